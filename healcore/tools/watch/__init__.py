"""Follows a live run in a terminal."""
