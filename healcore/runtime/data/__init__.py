"""The position of a run in its data, for any loader: rewind, skip batches, resume.

A user's loader:
    loader_parts       what healcore looks for in a loader, and finds there
    random_states      the global random generators, read and restored

The readers, one for each kind of loader:
    loader_adapter     the protocol of a reader: begins epochs, saves and restores the state
    adapter_choice     which reader a loader gets
    stateful_loaders   loaders with a state, by `state_dict`, by an iterator, or by an index
    torch_loader       torch's DataLoader of a map-style dataset
    function_loader    a function that makes a stream again
    scan_blocks        the blocks of a loop that JAX compiles as a whole

The batches of one loader:
    positions          ids of batches, positions for a checkpoint
    sampler_epochs     the numbers that `set_epoch` of samplers gets
    cursor             reads epochs, skips batches, reads again after failures, moves to positions

All sources of a run:
    source             a named stream of batches, whose passes a restart finds again
    sources            the sources, from the begin of a pass to a checkpoint and a rollback

What `runtime/run` calls:
    Sources.begin          a loop begins: the cursor of its loader, at the saved position
    SourceCursor.next      reads the next batch
    Sources.position       the positions of all sources, for a snapshot
    Sources.seek           the only way back, at a start and at a rollback; `skip` marks bad batches
    Sources.train          a step has used the batches that were read
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
