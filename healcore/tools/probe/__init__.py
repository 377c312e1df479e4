"""Judges whether a loss curve, an optimizer state or a checkpoint is healthy.

Readers of checkpoints execute nothing in a file.
"""
