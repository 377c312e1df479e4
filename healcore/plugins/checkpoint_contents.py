"""The adapter need "checkpoint_reader": opens checkpoints of a framework's formats for the probes.

`healcore.tools.probe` reads the formats that need no framework (safetensors, Orbax).
"""

from __future__ import annotations

import math
import pathlib
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from healcore.core.errors import HealcoreError

Path = tuple[str, ...]
"""Where a value lies in the saved tree: ("optimizer", "state", "0", "exp_avg_sq")."""

PIECE = 1 << 20
"""Elements in memory at a time, if the format allows reading less than an array."""

MOST_PARTS = 256
"""Most parts of a path; no program nests as deeply."""


class ProbeError(HealcoreError, ValueError):
    """Something cannot be probed: the message names it and what to pass instead."""


class Damaged(ProbeError):
    """A readable file with contents that no writer produces."""


class Array(NamedTuple):
    """One array."""

    path: Path
    dtype: str
    """Its name in NumPy, ml_dtypes and torch: "bfloat16"."""
    shape: tuple[int, ...]
    read: Callable[[], Iterator[np.ndarray]]
    """Reads every element once, in any order, in 1-d pieces of a dtype that NumPy can compare and
    add (float32 for the smaller floats)."""
    storage: Hashable | None = None
    """Arrays with equal values are one array saved under several names."""
    in_order: bool = True
    """Whether the arrays come in the order that the program has them in."""

    @property
    def size(self) -> int:
        """How many elements."""
        return math.prod(self.shape)

    def scalar(self) -> float:
        """The value of an array of one element."""
        return float(next(piece[0] for piece in self.read() if len(piece)))


class Contents(NamedTuple):
    """A whole opened checkpoint; its arrays are not read yet."""

    format: str
    """For people: "torch file", "Orbax checkpoint"."""
    arrays: Sequence[Array]
    values: Mapping[Path, Any]
    """Numbers, strings, booleans and None in the tree, besides the arrays."""
    notes: tuple[str, ...] = ()
    """What could not be read."""


class CheckpointReader(Protocol):
    """Opens the checkpoints of one framework. It executes nothing that is in them."""

    def open_file(self, path: pathlib.Path) -> Contents:
        """Opens a single file.

        Raises:
            Damaged: its parts contradict each other.
            ProbeError: it cannot be read without executing it, or not at all.
        """
        ...

    def open_directory(self, folder: pathlib.Path) -> Contents:
        """Opens a directory of shards; raises as `open_file` does."""
        ...

    def stored_arrays(self, data: pathlib.Path, names: Iterable[str]) -> dict[str, Array]:
        """The named arrays of a checkpoint of healcore's store, without those that are missing.

        Args:
            data: the directory `data` of the checkpoint.
            names: of the arrays, as in the checkpoint's `state.json`.

        Raises:
            ProbeError: it is damaged.
        """
        ...


class PathBudget:
    """Limits the paths of a checkpoint, so that a small file cannot name a large tree.

    A pickle can hold one list twice in another, and that one twice in a third: n bytes give 2**n
    leaves. The paths may take 1 MiB plus 256 bytes for each of the `nbytes` bytes of the file.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = (1 << 20) + 256 * nbytes

    def take(self, path: Path) -> Path:
        """Counts one path, and returns it; ProbeError if it or the sum of all is too long."""
        self._left -= sum(map(len, path)) + 8 * len(path) + 8
        if self._left < 0 or len(path) > MOST_PARTS:
            raise ProbeError(
                "it holds itself, or is nested too deeply, or names far more than it has bytes: "
                "there is no end to it"
            )
        return path


def dotted(path: Sequence[str]) -> str:
    """A path for people: `optimizer.state.0.exp_avg_sq`."""
    return ".".join(path)


def shape_of(numbers: Any) -> tuple[int, ...]:
    """A shape from a file; ValueError if it is not one, or larger than any memory."""
    if not isinstance(numbers, (list, tuple)) or len(numbers) > 64:
        raise ValueError("a shape in it is none")
    if any(type(size) is not int or not 0 <= size < 1 << 60 for size in numbers):
        raise ValueError("a shape in it is none")
    if math.prod(size for size in numbers if size) >= 1 << 60:
        raise ValueError("an array in it is larger than any memory")
    return tuple(numbers)


def first_line(error: Exception) -> str:
    """An error in one line of at most 200 characters."""
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
