"""Verified checkpoints: the store and the parts that all frameworks share.

    store           the checkpoints of one run, in host memory and in directories
    places          the `store` argument of a Healer: directories and stores
    checkpoints     which checkpoints are restored and deleted, and the errors of stores
    array_format    how the arrays of a framework are copied, written, read and restored
    manifest        the directories of checkpoints: written, listed, verified, removed
    files           files that a crash never leaves half written, and their digests
    values          nested Python values as JSON
    writer          a queue of jobs in the background of the training loop
    ranks           exchanges between the processes that write one checkpoint together
    claim           reserves a directory for one run

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""
