"""Trackers: events and metrics of a run, sent to a client that the user has already."""
