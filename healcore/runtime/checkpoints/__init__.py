"""Saving, verifying and deleting checkpoints in the background of the training loop."""
