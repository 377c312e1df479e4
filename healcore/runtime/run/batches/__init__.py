"""The batches of a run, from a loader to the step that trains on them.

One file for each part, in the order of a batch:

    step_batches  reads a batch, or skips it if it cannot be read; the batches of the next step
    batch_loop    a loop over the batches of a loader, from its begin to its end
    number_loops  loops over the numbers of epochs and of steps
"""
