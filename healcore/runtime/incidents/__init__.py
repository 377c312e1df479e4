"""Reads the records of steps: incidents, metrics and console lines."""
