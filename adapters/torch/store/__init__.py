"""Checkpoint stores for torch: on disk through DCP, in host memory, and both.

    store = TieredStore(MemoryStore(), DCPStore("checkpoints"))
    store.save(step, {"model": model, "optimizer": optimizer, "scheduler": scheduler})

and to restore: `apply(state, store.restore(step, state).state)`.
"""

from __future__ import annotations

from collections.abc import Collection

import torch.distributed as dist

from healcore.runtime.store import memory
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.tiered import TieredStore
from healcore.torch.store.dcp import DCPStore
from healcore.torch.store.gloo import initialized
from healcore.torch.store.host_copy import TorchCopier
from healcore.torch.store.state import apply

__all__ = ["DCPStore", "Keep", "MemoryStore", "TieredStore", "apply"]


class MemoryStore(memory.SnapshotStore):
    """Copies of a torch state in host memory, pinned where the state is on CUDA.

    Args:
        keep: how many copies of each kind are kept; a save adds one more while it runs.
        nonfinite_ok: patterns of array names (`model.*.mask`) where NaN and Inf are allowed.
    """

    def __init__(self, keep: Keep = memory.SMALL, *, nonfinite_ok: Collection[str] = ()) -> None:
        rank = dist.get_rank() if initialized() else 0
        super().__init__(TorchCopier(rank), keep, nonfinite_ok=nonfinite_ok)
