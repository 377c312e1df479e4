"""Readers of checkpoints: nothing in a file is executed, and arrays are read a piece at a time."""
