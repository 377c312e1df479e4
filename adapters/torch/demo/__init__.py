"""The demo in torch: the model, and the training loop as a user would write it."""
