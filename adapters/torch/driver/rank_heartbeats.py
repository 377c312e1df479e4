"""A number of each rank that the others can read: what the health probe needs of torch."""

from __future__ import annotations

import uuid

import torch.distributed as dist

from healcore.runtime.store.ranks import agreed
from healcore.torch.store.gloo import GlooRanks


class StoreHeartbeats:
    """Implements `healcore.runtime.hang_guard.health_probe.RankHeartbeats`.

    Over the store of torch.distributed. Every rank of `ranks` makes it at the same place of the
    program. `monitored_barrier` was tried instead: after one time-out its group is unusable, and a
    thread that waits in it when the program ends aborts the process.
    """

    def __init__(self, ranks: GlooRanks) -> None:
        self._store = dist.distributed_c10d._get_default_store()
        self._name = f"healcore/health/{agreed(ranks, uuid.uuid4().hex)}"
        self._rank = ranks.rank
        self.beat(0)
        ranks.gather(None)  # from here on every rank has a number, and reading one does not wait

    def beat(self, number: int) -> None:
        """Sets this rank's number."""
        self._store.set(f"{self._name}/{self._rank}", str(number))

    def last(self, rank: int) -> int:
        """The number of a rank."""
        return int(self._store.get(f"{self._name}/{rank}"))
