"""The top floor: what people run."""
