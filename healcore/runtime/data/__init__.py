"""The position of a run in its data, for any loader: rewind, skip batches, resume.

A user's loader:
    loader_protocols   what healcore looks for in a loader
    loader_parts       finds that: classes, methods, samplers, random generators
    random_states      the global random generators, read and restored

Positions:
    positions          ids of batches, positions for a checkpoint
    other_ranks        positions that another number of ranks has saved
    position_history   the last positions of a loader, from which earlier batches are reached
    rewind_obstacle    why a loader cannot be moved to an earlier position

The state of one loader, by its kind:
    loader_adapter     what saves and restores the state
    adapter_choice     which adapter a loader gets
    stateful_loaders   loaders with a state, by `state_dict`, by an iterator, or by an index
    torch_loader       torch's DataLoader of a map-style dataset
    torch_stream       torch's DataLoader of a stream
    function_loader    a function that makes a stream again
    scan_blocks        the blocks of a loop that JAX compiles as a whole

The batches of one loader, each file on top of the file before:
    loader_epoch       the epoch that is read: start, end, state
    batch_stream       batches in order, with ids, read again after failures in the network
    cursor             a stream within its epochs, which skips batches and moves to positions
    run_loader         a cursor, and what the program's loop does with its batches
  and their parts:
    sampler_epochs     the numbers that `set_epoch` of samplers gets
    read_retries       the attempts to read a batch
    unreadable_batch   takes the place of a batch that cannot be read, in a generator
    epoch_range        the epochs that a loop asks for

All loaders of a run:
    loader_registry    all loaders, from their first use to a checkpoint and a rollback
    loader_numbers     the number of each loader, by which a restarted program finds it again
    earlier_loaders    the positions that no loader of this process has taken over yet
    epoch_loop         the program's own loop over epochs, and its return to an earlier one
    rewinding          what a rollback does to the loaders of the steps
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
