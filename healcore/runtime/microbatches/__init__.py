"""Batches in parts that fit into memory."""
