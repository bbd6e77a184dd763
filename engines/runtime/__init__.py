"""Runtimes: each makes a stage callable."""
