"""Heals Lightning's `trainer.fit` with a callback."""
