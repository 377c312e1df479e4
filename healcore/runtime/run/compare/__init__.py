"""Compares the weights with earlier weights on the same batches.

`comparisons` says when weights are compared, and which are better. `rises` says what one comparison
shows. `evidence` has what is remembered, and which earlier weights are compared. `loss_function`
evaluates the user's `loss_fn`. `step_history` is what was seen of the last steps, and
`usual_values` which of their losses and norms are usual. `holding` learns the healthy ranges and
holds what has left them. `saved_form` is the form in a checkpoint.
"""
