"""Checkpoint stores for JAX: on disk in Orbax's format, in host memory, and both.

store = TieredStore(MemoryStore(), OrbaxStore("checkpoints"))
store.save(step, {"params": params, "opt_state": opt_state})
restored = store.restore(step, {"params": params, "opt_state": opt_state}).state
"""

from __future__ import annotations

from collections.abc import Collection

from healcore.jax.store.host_copy import JaxCopier
from healcore.jax.store.orbax import OrbaxStore
from healcore.runtime.store import memory
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.tiered import TieredStore

__all__ = ["Keep", "MemoryStore", "OrbaxStore", "TieredStore"]


class MemoryStore(memory.SnapshotStore):
    """Stores copies of a JAX state in host memory. Copies of arrays on a GPU are pinned.

    Args:
        keep: number of copies of each kind to keep. A save needs the memory of one more copy.
        nonfinite_ok: patterns of array names (`params.*.mask`) in which NaN and Inf are allowed.
    """

    def __init__(self, keep: Keep = memory.SMALL, *, nonfinite_ok: Collection[str] = ()) -> None:
        super().__init__(JaxCopier(), keep, nonfinite_ok=nonfinite_ok)
