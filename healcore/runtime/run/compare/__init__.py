"""Compares the weights with earlier weights on the same batches.

`comparisons` says when, and what is better; `anchors` which earlier weights are compared, `rises`
what a comparison shows, `evidence` what is remembered of it. `loss_function` evaluates the user's
`loss_fn`. `step_history` is what was seen of the last steps, and `usual_values` which of their
losses and norms are usual. `holding` learns the healthy ranges and holds what has left them.
`saved_form` is the form in a checkpoint.
"""
