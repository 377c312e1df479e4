"""Evidence that earlier weights are better than the current weights on the same batches."""
