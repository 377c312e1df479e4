"""Verified checkpoints: the store and the parts that all frameworks share.

    store           the checkpoints of one run, in host memory and in directories
    places          the `store` argument of a Healer: directories and stores
    checkpoints     which checkpoints are restored and deleted, and the errors of stores
    array_format    how the arrays of a framework are copied, written, read and restored
    state_copy      a state as structures and named arrays, and its copy in host memory
    host_memory     bytes in host memory: allocated, searched for NaN and Inf
    ring            the newest copies in host memory
    writer          a queue of jobs in the background of the training loop
    manifest        the directories of checkpoints: written, listed, verified, removed
    small_file      the arrays of a small checkpoint as one file
    files           files that a crash never leaves half written
    checksums       digests of files and of JSON content
    values          nested Python values as JSON
    ranks           exchanges between the processes that write one checkpoint together
    claim           reserves a directory for one run
    forks           resets objects with locks or threads in forked children

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""
