"""The position of a run in its data, for any loader: rewind, skip batches, resume.

loader_protocols   what healcore looks for in a user's loader
loader_parts       finds that: classes, methods, samplers, random generators
positions          ids of batches, positions for a checkpoint
other_ranks        positions that another number of ranks has saved
position_history   the epochs that a loop asks for, and the last positions in them
random_states      the global random generators, read and restored
loader_adapters    the state of each kind of loader; and of special kinds:
torch_loader       torch's DataLoader,
function_loader    a function that makes a stream again,
scan_blocks        the blocks of a loop that JAX compiles as a whole
sampler_epochs     the numbers that `set_epoch` of samplers gets
read_retries       the attempts to read a batch
loader_epoch       the epoch that is read: start, end, state
batch_stream       batches in order, with ids, read again after failures in the network
cursor             a stream within its epochs, which skips batches and moves to positions
run_loader         a cursor, and what the loop does with its batches
loader_registry    all loaders of a run
loader_numbers     the number of each loader, by which a restarted program finds it again
earlier_loaders    the positions that no loader of this process has taken over yet
epoch_loop         the program's own loop over epochs, and its return to an earlier one
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
