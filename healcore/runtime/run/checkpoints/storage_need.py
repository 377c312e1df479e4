"""How many bytes of disk and of host memory the checkpoints of a run need.

    need = StorageNeed(size_on_disk=84e9, size_in_memory=84e9, on_disk=6, in_memory=4)
    need.text()  # "up to 504 GB on disk and 336 GB in host memory"

The text adds to the arrays what each checkpoint also holds: the random states and the record of the
run.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.runtime.run.compare.anchor_choice import MAX_ANCHORS
from healcore.runtime.store.checkpoints import Keep

RECORD_BYTES = 60_000
"""Bytes of the structure, random states, positions and record in a checkpoint, as measured in torch
(25,000 in JAX)."""
_UNITS = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


class StorageNeed(NamedTuple):
    """The space that the checkpoints of one run need, on disk and in host memory.

    The first line of a run prints it. A disk or a host that is too small then shows at the start,
    instead of after hours. The numbers are upper bounds for optimizers with at most two moments.
    """

    size_on_disk: float
    """Bytes of one checkpoint in a directory, of all ranks together."""
    size_in_memory: float
    """Bytes of one copy in the host memory of this process."""
    on_disk: int
    """Largest number of checkpoints in a directory, without the checkpoints that `older` keeps."""
    in_memory: int
    """Largest number of copies in host memory."""
    older: bool = False
    """Whether the directory also keeps one checkpoint at each doubling of the steps."""
    directories: int = 1
    """Number of directories, each of which has all checkpoints; 0 for host memory only."""

    def text(self) -> str:
        """The need in words, for the first line of a run.

        Returns:
            A clause such as "up to 420 GB on disk and 252 GB in host memory".
        """
        in_memory = size_text(self.in_memory * (self.size_in_memory + RECORD_BYTES))
        if not self.directories:
            return f"up to {in_memory}"
        where = "on disk" if self.directories == 1 else "in each directory"
        on_disk = size_text(self.on_disk * (self.size_on_disk + RECORD_BYTES))
        text = f"up to {on_disk} {where} and {in_memory} in host memory"
        if self.older:
            one = size_text(self.size_on_disk + RECORD_BYTES)
            text += f"; each doubling of the steps adds {one} {where}"
        return text


def checkpoints_on_disk(keep: Keep, *, compares: bool) -> int:
    """The largest number of checkpoints in a directory at a time.

    A save is complete before another checkpoint is deleted, so there is one more than are kept. The
    checkpoints that `Keep.older` keeps are not counted: their number grows with the run.

    Args:
        keep: which checkpoints the run keeps on disk.
        compares: whether weights are compared. The checkpoints of the compared weights stay too.
    """
    return _max_at_once(keep, compares=compares)


def copies_in_memory(keep: Keep | None, *, compares: bool) -> int:
    """The largest number of copies of the state in host memory at a time.

    The next save needs the memory of one more copy, which stays allocated.

    Args:
        keep: which copies the run keeps in memory, or None if it keeps none.
        compares: whether weights are compared. The copies of the compared weights stay too.
    """
    if keep is None:
        return 1
    return _max_at_once(keep, compares=compares)


def _max_at_once(keep: Keep, *, compares: bool) -> int:
    """What is kept, one more copy while a save runs, and the weights to compare with."""
    copies = keep.most + 1
    if compares:
        copies += MAX_ANCHORS
    return copies


def size_text(size: float) -> str:
    """A number of bytes in words, with three significant digits.

    Units are decimal: 1 GB is 10^9 bytes.

    Args:
        size: number of bytes.

    Returns:
        "84 GB", "1.2 GB", "20 kB".
    """
    for factor, unit in _UNITS:
        if size >= 0.9995 * factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} bytes"
