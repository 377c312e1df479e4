"""Compares the weights with earlier weights on the same batches.

`comparisons` says when, and what is better; `evidence` is what it remembers, `loss_function`
evaluates the user's `loss_fn`, and `step_history` is what was seen of the last steps.
"""
