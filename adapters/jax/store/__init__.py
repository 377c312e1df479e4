"""Checkpoint stores for JAX: on disk through Orbax, in host memory, and both.

    store = TieredStore(MemoryStore(), OrbaxStore("checkpoints"))
    store.save(step, {"params": params, "opt_state": opt_state})

and to restore: `store.restore(step, {"params": params, "opt_state": opt_state}).state`.
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
    """Copies of a JAX state in host memory, pinned where the state is on an accelerator.

    Args:
        keep: how many copies of each kind stay; during a save there is one more.
        nonfinite_ok: patterns of array names (`params.*.mask`) where NaN and Inf are allowed.
    """

    def __init__(self, keep: Keep = memory.SMALL, *, nonfinite_ok: Collection[str] = ()) -> None:
        super().__init__(JaxCopier(), keep, nonfinite_ok=nonfinite_ok)
