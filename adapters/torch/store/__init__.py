"""Checkpoint stores for torch: in host memory, and in a directory through DCP.

    store = DCPStore("checkpoints")
    store.save(step, {"model": model, "optimizer": optimizer, "scheduler": scheduler})

and to restore: `apply(state, store.restore(step, state).state)`.
"""

from __future__ import annotations

import torch.distributed as dist

from healcore.runtime.store import CheckpointStore
from healcore.runtime.store.retention import Keep
from healcore.runtime.store.ring import IN_MEMORY
from healcore.torch.store.dcp import DCPStore
from healcore.torch.store.gloo import initialized
from healcore.torch.store.host_copy import TorchCopier
from healcore.torch.store.state import apply

__all__ = ["DCPStore", "Keep", "MemoryStore", "apply"]


class MemoryStore(CheckpointStore):
    """Copies of a torch state in host memory, pinned where the state is on CUDA.

    Args:
        keep: how many copies of each kind are kept; a save adds one more while it runs.
    """

    def __init__(self, keep: Keep = IN_MEMORY) -> None:
        rank = dist.get_rank() if initialized() else 0
        super().__init__(TorchCopier(rank), keep=keep)
