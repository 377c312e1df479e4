"""Rollbacks: the choice of the checkpoint, the journal that survives a crash, and resuming."""
