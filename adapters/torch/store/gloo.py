"""`GlooRanks`: exchanges small items between ranks, for stores and the Healer."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist

Group: TypeAlias = Any
"""A process group of torch.distributed."""

T = TypeVar("T")

MIN_TIMEOUT = timedelta(minutes=10)
"""Ranks write their parts of a checkpoint at different speeds, and wait for the slowest rank."""


class GlooRanks:
    """Exchanges over a gloo group, from any thread.

    The group is separate, because saves exchange in a background thread during training. Its
    time-out equals the default group's, but is at least `MIN_TIMEOUT`.

    Args:
        members: default-group numbers of the ranks; empty for all ranks. These ranks have to create
            this object at the same place in the program.

    Attributes:
        rank: number of this rank in the group, from 0.
        world: number of ranks in the group.
    """

    def __init__(self, *, members: Sequence[int] = ()) -> None:
        group: Group
        if members and len(members) < dist.get_world_size():
            group = _new_group(members, _timeout())
        else:
            group = dist.new_group(timeout=_timeout(), backend="gloo")
        self._group = group
        self._pool = ThreadPoolExecutor(1, "healcore-exchange")
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    @property
    def group(self) -> Group:
        """The gloo group of the ranks, for the collectives of DCP.

        Raises:
            RuntimeError: the program has destroyed the group, as it may do at its end.
        """
        if self._group not in dist.distributed_c10d._world.pg_map:
            raise RuntimeError(
                "the program has called destroy_process_group() within the Healer's block: call it "
                "after the block, because the last state is saved at its end"
            )
        return self._group

    def gather(self, item: T) -> list[T]:
        """Every rank's item, on every rank.

        All ranks have to call this in the same order. May be called from any thread.

        Args:
            item: anything that pickle can hold.

        Returns:
            The items in the order of the ranks.

        Raises:
            RuntimeError: a rank has left, or the group is destroyed.
        """
        group = self.group
        items: list[Any] = [None] * self.world
        # Not in the main thread, where a signal handler may raise between the two collectives of an
        # exchange. The next exchange would then meet the second collective of the other ranks, and
        # gloo would abort the process. The pool's only thread keeps the order.
        if threading.current_thread() is threading.main_thread():
            self._pool.submit(dist.all_gather_object, items, item, group).result()
        else:
            dist.all_gather_object(items, item, group)
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


def _new_group(members: Sequence[int], timeout: timedelta | None) -> Group:
    """Creates a gloo group of `members`. These ranks alone have to call it.

    torch (2.13) derives a group's name from the number of groups in the process, so ranks with
    different numbers would wait forever. Ranks with fewer groups first create groups of one rank.
    """
    world: Any = dist.distributed_c10d._world
    store: Any = dist.distributed_c10d._get_default_store()
    ranks = sorted(members)
    rank = dist.get_rank()
    groups = len(world.pg_names)
    name = f"healcore/groups/{ranks}"
    name = f"{name}/{store.add(f'{name}/calls/{rank}', 1)}"
    store.set(f"{name}/{rank}", str(groups))
    keys = [f"{name}/{member}" for member in ranks]
    store.wait(keys, timeout or MIN_TIMEOUT)
    max_groups = 0
    for key in keys:
        max_groups = max(max_groups, int(store.get(key)))
    for _ in range(max_groups - groups):
        dist.new_group([rank], backend="gloo", use_local_synchronization=True)
    return dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)


def _timeout() -> timedelta | None:
    """The default group's time-out, at least `MIN_TIMEOUT`, or None for torch's default."""
    group: Group = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return max(MIN_TIMEOUT, *(backend.options._timeout for backend in backends))
    except (AttributeError, TypeError, RuntimeError, ValueError):  # a backend without a time-out
        return None


def is_distributed() -> bool:
    """Whether this process is one of several ranks.

    False also if torch was built without torch.distributed, if the program has not called
    `init_process_group`, and for a group of one rank.
    """
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
