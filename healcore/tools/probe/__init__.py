"""Judges whether a loss curve, an optimizer state or a checkpoint is healthy."""
