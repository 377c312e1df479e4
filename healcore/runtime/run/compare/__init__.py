"""Compares the weights with earlier weights on the same batches.

    comparisons        when weights are compared, and which are better
        step_history   what was seen of the last steps: signs of trouble, and suspect steps
        usual_values   which losses and norms of these steps are usual
        credit         how much comparisons may cost
        anchor_choice  which earlier weights are compared, and which are kept
        loss_function  evaluates the user's `loss_fn` on the batches of a `trained_step`
        rises          what one comparison shows
        evidence       the evidence of all comparisons with the same earlier weights (`Anchor`)
        suspicion      what follows from the evidence, up to a verdict
    comparison_state   what these parts share, and a checkpoint holds

Begin with `Comparisons.observe`, which runs after each step.
"""
