"""`GlooRanks`: exchanges small items between ranks, for stores and the Healer."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=30)
"""Long, because ranks write their parts of a checkpoint at different speeds, and wait for the
slowest rank. A rank that has ended is noticed at once."""


class GlooRanks:
    """Exchanges over a gloo group, from any thread.

    The group is separate, because saves exchange in a background thread during training.

    Args:
        members: default-group numbers of the ranks; empty for all ranks. These ranks have to create
            this object at the same place in the program.

    Attributes:
        group: the gloo group of the ranks, for the collectives of DCP.
        rank: number of this rank in the group, from 0.
        world: number of ranks in the group.
    """

    def __init__(self, *, members: Sequence[int] = ()) -> None:
        group: Any = dist.new_group(
            sorted(members) or None, TIMEOUT, backend="gloo", use_local_synchronization=True
        )
        self.group = group
        self._pool = ThreadPoolExecutor(1, "healcore-exchange")
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank.

        All ranks have to call this in the same order. May be called from any thread.

        Args:
            item: anything that pickle can hold.

        Returns:
            The items in the order of the ranks.

        Raises:
            RuntimeError: a rank has left, or the group is destroyed.
        """
        items: list[Any] = [None] * self.world
        # Not in the main thread, where a signal handler may raise between the two collectives of an
        # exchange. The next exchange would then meet the second collective of the other ranks, and
        # gloo would abort the process. The pool's only thread keeps the order.
        self._pool.submit(dist.all_gather_object, items, item, self.group).result()
        return items

    def largest(self, values: Sequence[int]) -> list[int]:
        """The maximum of each value (0 to 255) over the ranks, by one `all_reduce` of bytes.

        Faster than `gather`, because nothing is pickled.

        Args:
            values: numbers from 0 to 255, of the same length on every rank.

        Returns:
            The maxima, in the order of the values.

        Raises:
            RuntimeError: a rank has left, or the group is destroyed.
        """
        maxima = torch.tensor(values, dtype=torch.uint8)
        dist.all_reduce(maxima, dist.ReduceOp.MAX, group=self.group)
        return maxima.tolist()


def is_distributed() -> bool:
    """Whether this process is one of several ranks.

    False also if torch was built without torch.distributed, if the program has not called
    `init_process_group`, and for a group of one rank.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
