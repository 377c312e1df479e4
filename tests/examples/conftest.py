"""Examples that compare their weights with earlier ones."""
