"""Rollbacks: orders, evidence, the choice of a checkpoint, the journal and the restoring."""
