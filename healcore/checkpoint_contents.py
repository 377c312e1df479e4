"""Contents of a checkpoint, as the capability "checkpoint_reader" of an adapter opens it.

The reader has `open_file(path)` and `open_directory(folder)`, which return `Contents` and execute
nothing. `healcore.tools.probe` itself reads Orbax, which needs no framework.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

Path = tuple[str, ...]
"""Keys from the root of the saved tree: ("optimizer", "state", "0", "exp_avg_sq")."""


class ProbeError(HealcoreError, ValueError):
    """An input that cannot be probed; the message names it and what to pass instead."""


class Damaged(ProbeError):
    """A readable file with contents that no writer produces."""


class Array(NamedTuple):
    """One array of a checkpoint, which is not read yet."""

    dtype: str
    """Name of the dtype in NumPy, ml_dtypes and torch: "bfloat16"."""
    shape: tuple[int, ...]
    read: Callable[[], np.ndarray]
    """Returns the elements, 1-d, in any order, with a dtype of NumPy (float32 for bfloat16)."""
    storage: Hashable | None = None
    """Equal values mark one array that is saved under several names."""
    in_order: bool = True
    """Whether the arrays have the program's order."""

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


class Contents(NamedTuple):
    """An opened checkpoint."""

    format: str
    """Name of the format for messages: "torch file", "Orbax checkpoint"."""
    leaves: Mapping[Path, Any]
    """The arrays (`Array`), numbers, strings, booleans and None in the tree."""
    notes: tuple[str, ...] = ()
    """Names of parts that could not be read."""

    @property
    def arrays(self) -> dict[Path, Array]:
        """The leaves that are arrays."""
        return {path: leaf for path, leaf in self.leaves.items() if isinstance(leaf, Array)}


def leaves_of(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Yields the values in nested containers, with their paths; a dotted key is several keys."""
    if isinstance(tree, list | tuple):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        yield path or ("tensor",), tree  # the whole file may be one tensor
        return
    for key, part in tree.items():
        yield from leaves_of(part, (*path, *str(key).split(".")))


def first_line(error: Exception) -> str:
    """The first line of an error's message, at most 200 characters, or the name of its type."""
    lines = str(error).strip().splitlines()
    if not lines:
        return type(error).__name__
    return lines[0][:200]
