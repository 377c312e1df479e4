"""The capability "checkpoint_reader": opens a framework's checkpoints for the probes.

`healcore.tools.probe` itself reads the formats that need no framework (safetensors, Orbax).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.errors import HealcoreError

Path = tuple[str, ...]
"""Keys from the root of the saved tree: ("optimizer", "state", "0", "exp_avg_sq")."""

PIECE = 1 << 20
"""Number of elements read at a time, if the format allows partial reads."""

MOST_PARTS = 256
"""Limit of the parts of a path; no program nests so deeply."""


class ProbeError(HealcoreError, ValueError):
    """An input that cannot be probed; the message names it and what to pass instead."""


class Damaged(ProbeError):
    """A readable file with contents that no writer produces."""


class Array(NamedTuple):
    """One array of a checkpoint."""

    path: Path
    dtype: str
    """Name of the dtype in NumPy, ml_dtypes and torch: "bfloat16"."""
    shape: tuple[int, ...]
    read: Callable[[], Iterator[np.ndarray]]
    """Yields each element once, in any order, in 1-d pieces. NumPy can compare and add their dtype
    (float32 for the smaller floats)."""
    storage: Hashable | None = None
    """Equal values mark one array that is saved under several names."""
    in_order: bool = True
    """Whether the arrays have the program's order."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def scalar(self) -> float:
        """The value of an array of one element."""
        return float(next(piece[0] for piece in self.read() if len(piece)))


class Contents(NamedTuple):
    """An opened checkpoint, whose arrays are not read yet."""

    format: str
    """Name of the format for messages: "torch file", "Orbax checkpoint"."""
    arrays: Sequence[Array]
    values: Mapping[Path, Any]
    """Numbers, strings, booleans and None in the tree, except the arrays."""
    notes: tuple[str, ...] = ()
    """Names of parts that could not be read."""


class CheckpointReader(Protocol):
    """Opens the checkpoints of one framework without executing their contents."""

    def open_file(self, path: pathlib.Path) -> Contents:
        """Opens a single file.

        Raises:
            Damaged: the parts of the file contradict each other.
            ProbeError: the file cannot be read, or only by executing its contents.
        """
        ...

    def open_directory(self, folder: pathlib.Path) -> Contents:
        """Opens a directory of shards; raises as `open_file` does."""
        ...

    def stored_arrays(self, data: pathlib.Path, names: Iterable[str]) -> dict[str, Array]:
        """Returns the named arrays of a checkpoint in healcore's store, except missing ones.

        Args:
            data: the directory `data` of the checkpoint.
            names: names as in the checkpoint's `state.json`.

        Raises:
            ProbeError: the checkpoint is damaged.
        """
        ...


class PathBudget:
    """Limits the paths of a checkpoint, so that a small file cannot name a huge tree.

    A pickle can nest each list twice in the next list: n bytes give 2**n leaves. The total size of
    the paths is limited to 1 MiB plus 256 bytes per byte of the file.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = (1 << 20) + 256 * nbytes

    def take(self, path: Path) -> Path:
        """Returns the path. Raises ProbeError if it or the sum of all paths is too long."""
        self._left -= sum(map(len, path)) + 8 * len(path) + 8
        if self._left < 0 or len(path) > MOST_PARTS:
            raise ProbeError("its tree is cyclic, nested too deeply, or far larger than the file")
        return path


def dotted(path: Sequence[str]) -> str:
    """Joins a path for messages: `optimizer.state.0.exp_avg_sq`."""
    return ".".join(path)


def shape_of(numbers: Any) -> tuple[int, ...]:
    """Converts a shape from a file; ValueError if it is invalid or larger than any memory."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > 64:
        raise ValueError("it contains an invalid shape")
    if any(type(size) is not int or not 0 <= size < 1 << 60 for size in numbers):
        raise ValueError("it contains an invalid shape")
    if math.prod(size for size in numbers if size) >= 1 << 60:
        raise ValueError("it contains an array that is larger than any memory")
    return tuple(numbers)


def first_line(error: Exception) -> str:
    """The error message's first line, at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
