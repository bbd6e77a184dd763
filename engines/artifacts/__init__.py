"""The artifacts folder on disk: its manifest, what its files were made from, and how they get there."""
