"""Lightning: a callback that heals `trainer.fit`."""
