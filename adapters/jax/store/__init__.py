"""Checkpoint stores for JAX: in host memory, and in a directory in Orbax's format.

store = OrbaxStore("checkpoints")
store.save(step, {"params": params, "opt_state": opt_state})
restored = store.restore(step, {"params": params, "opt_state": opt_state}).state
"""

from __future__ import annotations

from healcore.jax.store.orbax import MemoryStore, OrbaxStore

__all__ = ["MemoryStore", "OrbaxStore"]
