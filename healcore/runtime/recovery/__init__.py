"""Rollbacks: orders, evidence, the choice of a checkpoint, the record and the restoring."""
