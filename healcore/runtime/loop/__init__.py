"""A training run: its start, what happens between two steps, and its end."""
