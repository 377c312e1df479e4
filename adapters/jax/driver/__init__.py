"""The live state of a JAX run, its engines, and the records of its steps."""
