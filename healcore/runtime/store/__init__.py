"""Verified checkpoints: the store and the parts that all frameworks share.

    store           the checkpoints of one run, in host memory and in a directory
    several         the same in several directories
    checkpoints     which checkpoints are restored and deleted, and the errors of stores
    array_format    how the arrays of a framework are copied, written, read and restored
    flat_state      a state as JSON-safe structures and named arrays
    host_copy       a copy of the state after one step in host memory
    host_memory     bytes in host memory: allocated, digested, searched for NaN and Inf
    ring            the newest copies in host memory
    writer          a queue of jobs in the background of the training loop
    manifest        the directories of checkpoints: written, listed, verified, removed
    single_file     a small checkpoint of one process as one file
    files           files that a crash never leaves half written
    checksums       digests of files and of JSON content
    values          nested Python values as JSON
    mismatches      how the structures of a saved and a live value differ
    ranks           exchanges between the processes that write one checkpoint together
    claim           reserves a directory for one run
    forks           resets objects with locks or threads in forked children

The stores come from the adapters: `healcore.torch.store`, `healcore.jax.store`.
"""
