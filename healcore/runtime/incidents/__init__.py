"""Reads the records of steps: incidents, metrics, console lines and the user's hooks."""
