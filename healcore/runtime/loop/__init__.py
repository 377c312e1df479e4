"""A run under way: its beginning, what happens between two steps, and its end."""
