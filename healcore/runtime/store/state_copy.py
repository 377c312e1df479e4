"""A state as JSON-safe structures and named arrays, and its copy in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from healcore.runtime.store import checksums, values
from healcore.runtime.store.checkpoints import StoreError

Entries = Mapping[str, Mapping[str, Any]]
"""Name in the state -> structure. In torch: {"tree": node} with "stateful" and "per_rank", and
"identity" (part -> text that must be equal) for optimizers and schedulers. In JAX: {"tree": node}
for an object with `state_dict`, {"leaves": [[path, node], …]} for a pytree."""
Record = Mapping[str, Any]
"""The record of a run, JSON-safe."""


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
    parts: dict[Any, Any]
    """Place of a part in its array -> the part in this process, an array of the framework or of
    NumPy with `shape`, `dtype` and `nbytes`. A whole array has one part. The format chooses what a
    place is."""
    layout: Any = None
    """The framework's description of the sharding."""


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

    @property
    def parts(self) -> list[Any]:
        """The parts of all arrays, in order."""
        return [part for leaf in self.leaves.values() for part in leaf.parts.values()]

    def add(self, path: values.Path, dtype: str, parts: dict[Any, Any], layout: Any = None) -> str:
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

    def entries_by_owner(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The entries of values that all ranks share, and the entries of this rank's own values."""
        shared: dict[str, Any] = {}
        own: dict[str, Any] = {}
        for name, entry in self.entries.items():
            owner = own if entry.get("per_rank") else shared
            owner[name] = entry
        return shared, own


@dataclass(eq=False)
class HostCopy:
    """A copy of the state after one step in host memory.

    The training changes its arrays at the next step, while the copy is inspected and written in the
    background. So a save costs the training only the time of one copy:

        training    step ── copy ── step ── step ── step ── ...
                             │
        background           └── inspect ── add to the ring ── write to the directory
    """

    step: int
    """Number of optimizer steps that the state has had."""
    flat: FlatState
    """The state, with its arrays in host memory."""
    copied: Callable[[], object]
    """Waits for the copies from an accelerator, which are asynchronous."""
    record: bytes | None
    """The sealed record of the run, or None."""
    attempt: int
    """Number of the attempt that saves the state, from 1."""
    created: float = field(default_factory=time.time)
    """Wall-clock seconds since 1970. Equal only for the same save."""
    nonfinite: tuple[str, ...] = ()
    """Names of the arrays with NaN or Inf on any rank, allowed or not."""

    @property
    def nbytes(self) -> int:
        """Bytes of host memory held."""
        return sum(part.nbytes for part in self.flat.parts)

    @property
    def unsealed_record(self) -> dict[str, Any] | None:
        """A fresh copy of the record, or None without one."""
        if self.record is None:
            return None
        return checksums.unseal(self.record)


def raw(part: Any) -> np.ndarray:
    """The bytes of a part in host memory.

    Returns:
        The bytes, uint8 (n,). They share the memory of the part if its elements are in order.
    """
    return np.ascontiguousarray(part).reshape(-1).view(np.uint8)


def checked_step(step: Any) -> int:
    """The number of a step as an int.

    Args:
        step: a whole number, also of NumPy.

    Raises:
        StoreError: it is not a whole number >= 0.
    """
    is_whole = hasattr(step, "__index__") and not isinstance(step, bool)
    if not is_whole or int(step) < 0:
        raise StoreError(f"step is a whole number >= 0, not {step!r}: pass the optimizer step")
    return int(step)


def sealed_record(record: Record) -> bytes:
    """The record of a run as bytes for a file, see `checksums.seal`.

    Raises:
        StoreError: the record is not JSON-safe.
    """
    try:
        return checksums.seal(record)
    except (TypeError, ValueError) as error:
        raise StoreError(
            f"the record must be JSON-safe ({error}): pass the adapter's to_dict()"
        ) from None
