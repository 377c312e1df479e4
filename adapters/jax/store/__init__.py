"""Checkpoint stores for JAX: in host memory, and in a directory in Orbax's format.

store = OrbaxStore("checkpoints")
store.save(step, {"params": params, "opt_state": opt_state})
restored = store.restore(step, {"params": params, "opt_state": opt_state}).state
"""

from __future__ import annotations

from healcore.jax.store.host_copy import JaxCopier
from healcore.jax.store.orbax import OrbaxStore
from healcore.runtime.store import CheckpointStore
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.ring import IN_MEMORY

__all__ = ["Keep", "MemoryStore", "OrbaxStore"]


class MemoryStore(CheckpointStore):
    """Stores copies of a JAX state in host memory. Copies of arrays on a GPU are pinned.

    Args:
        keep: number of copies of each kind to keep. A save needs the memory of one more copy.
    """

    def __init__(self, keep: Keep = IN_MEMORY) -> None:
        super().__init__(JaxCopier(), keep=keep)
