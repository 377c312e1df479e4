"""Saving, proving and deleting checkpoints behind the training loop."""
