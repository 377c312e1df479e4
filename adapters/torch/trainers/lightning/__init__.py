"""Heals `trainer.fit` of Lightning by a callback."""
