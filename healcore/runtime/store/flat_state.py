"""`FlatState`: a state as JSON-safe structures and named arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from healcore.runtime.store import values

Part = Any
"""The part of an array in this process: an array of the framework, or of NumPy in host memory. It
has `shape`, `dtype` and `nbytes`."""
ShardPlace = Any
"""Place of a part in its array. It is hashable; the format chooses what it is."""
Layout = Any
"""The framework's description of how an array is sharded, or None for a whole array."""
FrameworkArray = Any
"""An array of the framework: a tensor of torch, an array of JAX."""
Value = Any
"""A value of the user's state: a tree of arrays and Python values, or an object with `state_dict`.
"""
NamedState = Mapping[str, Value]
"""Name -> value."""
Entries = Mapping[str, Mapping[str, Any]]
"""Name in the state -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and
"identity" (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node}
for an object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""


@dataclass(eq=False)
class Leaf:
    """One array of a state.

    A sharded array has a part for each shard that this process has. A process saves only its own
    parts, and the ranks together save the whole array.
    """

    name: str
    """Name of the array in the whole state, such as `optimizer.state.0.exp_avg`."""
    dtype: str
    """Name of the dtype, such as "bfloat16"."""
    parts: dict[ShardPlace, Part]
    """`ShardPlace` -> the part of the array in this process. A whole array has one part."""
    layout: Layout = None
    """The framework's description of the sharding."""
    digests: dict[ShardPlace, str] = field(default_factory=dict)
    """`ShardPlace` -> xxh3 of the part, hexadecimal, once the copy of the array is inspected."""


class FlatState:
    """A state as JSON-safe structures and named arrays, which `ArrayFormat.flatten` collects.

    The structures go into a JSON file, and the arrays into files of the framework. A name connects
    the two: the structure has it in place of the array.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        """See `Entries`."""
        self.leaves: dict[str, Leaf] = {}
        """Name of an array -> the array."""
        self.treedefs: dict[str, Any] = {}
        """Name -> PyTreeDef in JAX. It is not saved: a restore uses the structure of the live
        pytrees."""

    def entries_by_owner(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The entries of values that all ranks share, and the entries of this rank's own values."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, entry in self.entries.items():
            owner = own if entry.get("per_rank") else shared
            owner[name] = entry
        return shared, own

    def add(
        self, path: values.Path, dtype: str, parts: dict[ShardPlace, Part], layout: Layout = None
    ) -> str:
        """Adds an array.

        Args:
            path: its place in the state.
            dtype: name of the dtype, such as "bfloat16".
            parts: its parts in this process, not copied.
            layout: how it is sharded, or None.

        Returns:
            Its name, such as `optimizer.state.0.exp_avg`. If two paths give the same name, because
            a key has a dot, the second name gets a number.
        """
        plain = ".".join(map(str, path))
        name, number = plain, 1
        while name in self.leaves:
            number += 1
            name = f"{plain}#{number}"
        self.leaves[name] = Leaf(name, dtype, parts, layout)
        return name


def parts_of(flat: FlatState | None) -> list[Part]:
    """The parts of all arrays, in order. Empty for None."""
    parts: list[Part] = []
    if flat is not None:
        for leaf in flat.leaves.values():
            parts += leaf.parts.values()
    return parts


def raw(part: Part) -> np.ndarray:
    """The bytes of a part in host memory.

    Returns:
        The bytes, uint8 (n,). They share the memory of the part if its elements are in order.
    """
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)
