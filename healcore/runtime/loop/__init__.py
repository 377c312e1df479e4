"""A training run: its start, the work between two steps, and its end."""
