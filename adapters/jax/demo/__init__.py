"""The demo in JAX and Flax: the model, and the training loop as a user would write it."""
