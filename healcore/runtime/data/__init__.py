"""The position of a run in its data, for any loader: rewind, skip batches, resume.

    random_states      the random generators, read and restored
    loaders            what healcore looks for in a user's loader, and finds there
    positions          ids of batches, positions for a checkpoint

    readers            the protocol of a reader: begins an epoch, returns to a place; which reader a
                       loader gets, and all readers but one
    torch_reader       the reader of torch's DataLoader of a map-style dataset

    cursor             reads epochs, skips batches, reads again after failures, moves to positions

    sources            the named streams of a run, from the begin of a pass to a checkpoint and a
                       rollback

What `runtime/run` calls:
    Sources.begin          a loop begins: the cursor of its loader, at the saved position
    Cursor.next            reads the next batch
    Sources.position       the positions of all sources, for a snapshot
    Sources.seek           the only way back, at a start and at a rollback; `skip` marks bad batches
    Sources.train          a step has used the batches that were read
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
