"""Every table for people."""
