"""Readers of checkpoints. They execute nothing in a file and read arrays in pieces."""
