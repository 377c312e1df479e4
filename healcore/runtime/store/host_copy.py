"""`HostCopy`: a copy of the state after one step in host memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from healcore.runtime.store import checksums
from healcore.runtime.store.checkpoints import CheckpointDamaged, StoreError
from healcore.runtime.store.flat_state import FlatState, Leaf, ShardPlace, parts_of

MEMORY = "memory"
"""Place of a copy in messages, where a file has a path."""

Copied = Callable[[], object]
"""Waits for copies from an accelerator, which are asynchronous."""
Record = Mapping[str, Any]
"""The record of a run, JSON-safe."""


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
    copied: Copied
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
        return sum(part.nbytes for part in parts_of(self.flat))

    @property
    def unsealed_record(self) -> dict[str, Any] | None:
        """A fresh copy of the record, or None without one."""
        if self.record is None:
            return None
        return checksums.unseal(self.record)

    def verify(self, leaf: Leaf, place: ShardPlace, digest: str) -> None:
        """Compares the digest of a part with the digest of its inspection.

        Memory may change too: by a bit that flips, or by a program that writes through a pointer.

        Args:
            leaf: the array.
            place: place of the part.
            digest: its digest now.

        Raises:
            CheckpointDamaged: the digests differ.
        """
        if digest != leaf.digests[place]:
            raise CheckpointDamaged(self.step, MEMORY, f"{leaf.name}{place}", checksums.DIFFERS)


def checked_step(step: Any) -> int:
    """Checks the number of a step.

    Args:
        step: a whole number, also of NumPy.

    Returns:
        The number as an int.

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
