"""Dominance: evidence that earlier weights are better than the current ones on the same batches."""
