"""The artifacts folder on disk: what it holds, from what, and how files get there."""
