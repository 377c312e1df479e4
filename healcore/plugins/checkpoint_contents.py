"""The contents of a checkpoint, whatever wrote it: what the probes ask of an adapter.

The need is "checkpoint_reader": a `CheckpointReader` of the framework's own formats. Formats that
need no framework (safetensors, Orbax) are read by `healcore.tools.probe.contents`.
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
"""Elements that are in memory at a time, where the format allows to read less than an array."""

MOST_PARTS = 256
"""Of a path. No program nests as deeply."""


class ProbeError(HealcoreError, ValueError):
    """Something cannot be probed: the message names it and what to pass instead."""


class Damaged(ProbeError):
    """It can be read, and is not what any writer writes."""


class Array(NamedTuple):
    """One array."""

    path: Path
    dtype: str
    """As NumPy, ml_dtypes and torch name it: "bfloat16"."""
    shape: tuple[int, ...]
    read: Callable[[], Iterator[np.ndarray]]
    """Its elements, each once and in any order, in pieces: 1-d, of a dtype that NumPy can compare
    and add (float32 for the smaller floats)."""
    storage: Hashable | None = None
    """Two arrays with the same one are one array saved under two names."""
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
    """A whole checkpoint, opened; its arrays are not read yet."""

    format: str
    """For people: "torch file", "Orbax checkpoint"."""
    arrays: Sequence[Array]
    values: Mapping[Path, Any]
    """Numbers, strings, booleans and None that lie in the tree besides the arrays."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""


class CheckpointReader(Protocol):
    """Opens the checkpoints of one framework. It executes nothing that is in them."""

    def open_file(self, path: pathlib.Path) -> Contents:
        """A single file.

        Raises:
            Damaged: its parts contradict each other.
            ProbeError: it cannot be read without executing it, or not at all.
        """
        ...

    def open_directory(self, folder: pathlib.Path) -> Contents:
        """A directory of shards; raises as `open_file` does."""
        ...

    def stored_arrays(self, data: pathlib.Path, names: Iterable[str]) -> dict[str, Array]:
        """Arrays of a checkpoint of healcore's store; those that are not there are left out.

        Args:
            data: the directory `data` of the checkpoint.
            names: of the arrays, as its `state.json` has them.

        Raises:
            ProbeError: it is damaged.
        """
        ...


class PathBudget:
    """Limits the paths of a checkpoint, so that a small file cannot name a large tree.

    A pickle can have one list at two places of another, and that at two of a third: of n bytes
    there are 2**n leaves. Here they may take a megabyte, and 256 bytes for each byte of the file.

    Args:
        nbytes: of what the names were read from.
    """

    def __init__(self, nbytes: int) -> None:
        self._left = (1 << 20) + 256 * nbytes

    def take(self, path: Path) -> Path:
        """Counts one path, and returns it.

        Raises:
            ProbeError: the budget is exhausted, or the path has more than 256 parts.
        """
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
    """A shape that a file names.

    Raises:
        ValueError: it is none, or larger than any memory.
    """
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
