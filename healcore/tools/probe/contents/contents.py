"""What a checkpoint holds, whatever wrote it: named arrays that are read in pieces, and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.tools.probe.verdict import ProbeError

Path = tuple[str, ...]
"""Where a value lies in the saved tree: ("optimizer", "state", "0", "exp_avg_sq")."""

PIECE = 1 << 20
"""Elements that are in memory at a time, where the format allows to read less than an array."""


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
    """A whole checkpoint, opened; nothing of its arrays is read yet."""

    format: str
    """In words: "torch file", "Orbax"."""
    arrays: Sequence[Array]
    values: Mapping[Path, Any]
    """Numbers, strings, booleans and None that lie in the tree beside the arrays."""
    notes: tuple[str, ...] = ()
    """What could not be looked at."""


def dotted(path: Sequence[str]) -> str:
    """A path for people: `optimizer.state.0.exp_avg_sq`."""
    return ".".join(path)


MOST_PARTS = 256
"""Of a path. No program nests as deeply."""


class Names:
    """Counts what the paths of a checkpoint take, so that a small file cannot name a large tree.

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
            ProbeError: there is no end to them.
        """
        self._left -= sum(map(len, path)) + 8 * len(path) + 8
        if self._left < 0 or len(path) > MOST_PARTS:
            raise ProbeError(
                "it holds itself, or is nested too deeply, or names far more than it has bytes: "
                "there is no end to it"
            )
        return path


def shape_of(numbers: Any) -> tuple[int, ...]:
    """A shape that a file names.

    Raises:
        ValueError: it is none, or one that no memory has room for.
    """
    if not isinstance(numbers, (list, tuple)) or len(numbers) > 64:
        raise ValueError("a shape in it is none")
    if any(type(size) is not int or not 0 <= size < 1 << 60 for size in numbers):
        raise ValueError("a shape in it is none")
    if math.prod(size for size in numbers if size) >= 1 << 60:
        raise ValueError("an array in it is larger than any memory")
    return tuple(numbers)


def flattened(tree: Any, names: Names, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dictionaries, lists and tuples, each with its path.

    Args:
        tree: what a file held.
        names: counts every place in it.
        path: where it lies.

    Raises:
        ProbeError: see `Names`.
    """
    names.take(path)
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from flattened(part, names, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, part in enumerate(tree):
            yield from flattened(part, names, (*path, str(number)))
    else:
        yield path, tree
