"""The peers side by side: how fast each takes the same steps, as ratios of one run."""
