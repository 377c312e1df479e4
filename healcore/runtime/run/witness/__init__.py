"""Whether earlier weights are better than the current weights, on the same batches.

    witness         when weights are compared, and what follows: `Witness.observe`
    evidence        the earlier weights that are kept, and how much speaks for them
    recent_steps    what is usual in the last steps, and which of them are suspect
    loss_function   evaluates the user's `loss_fn`

What is saved is one value, `evidence.ComparisonState`. It comes back with each checkpoint.
"""
