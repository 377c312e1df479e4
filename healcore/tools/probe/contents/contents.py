"""What a checkpoint holds, whatever wrote it: named arrays that are read in pieces, and numbers."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

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
        return int(np.prod(self.shape, dtype=np.int64))

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


def flattened(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The leaves of nested dictionaries, lists and tuples, each with its path."""
    if isinstance(tree, Mapping):
        for key, part in tree.items():
            yield from flattened(part, (*path, str(key)))
    elif isinstance(tree, (list, tuple)):
        for number, part in enumerate(tree):
            yield from flattened(part, (*path, str(number)))
    else:
        yield path, tree
