"""The position of a run in its data, for any loader: rewind, skip batches, resume.

loader_protocols   what healcore looks for in a user's loader, and how it finds that
positions          ids of batches, positions for a checkpoint
position_history   the epochs that a loop asks for, and the last positions in them
random_states      the global random generators, read and restored
loader_adapters    the state of each kind of loader; and of special kinds:
torch_loader       torch's DataLoader,
function_loader    a function that makes a stream again,
scan_blocks        the blocks of a loop that JAX compiles as a whole
loader_epoch       the epoch that is read: start, `set_epoch` of samplers, end, state
batch_stream       batches in order, with ids, read again after failures in the network
cursor             a stream within its epochs, and what the loop does with its batches
loader_registry    all loaders of a run
loop_places        where the program's loop and its loaders are, also of an earlier process
"""

from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.positions import BatchId, DataError, EmptyLoader, UnusableLoader

__all__ = ["BatchId", "Cursor", "DataError", "EmptyLoader", "UnusableLoader"]
