"""Checkpoint stores for torch: in host memory, and in a directory through DCP.

    store = DCPStore("checkpoints")
    store.save(step, {"model": model, "optimizer": optimizer, "scheduler": scheduler})

and to restore: `apply(state, store.restore(step, state).state)`.
"""

from __future__ import annotations

from healcore.torch.store.dcp import DCPStore, MemoryStore
from healcore.torch.store.state import apply

__all__ = ["DCPStore", "MemoryStore", "apply"]
