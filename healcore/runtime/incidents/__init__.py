"""Reads the records of steps: incidents, metrics, the user's hooks, and whether there is damage."""
