"""Splits batches into parts that fit into memory."""
