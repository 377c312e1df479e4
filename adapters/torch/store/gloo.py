"""The ranks of a torch process group, as stores see them."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from healcore.runtime.store.errors import StoreError

SHORTEST = timedelta(minutes=10)
"""Ranks write their parts of a checkpoint at different speeds and wait for the slowest rank."""


class GlooRanks:
    """Exchanges over a gloo group, from any thread.

    The group is separate, because saves exchange in a background thread, at the same time as the
    training. Its time-out equals the time-out of the default group, but is at least `SHORTEST`.

    Args:
        group: a gloo group that nothing else uses; None for a new group. Then all of its ranks make
            this object at the same place in the program.
        members: ranks (of the default group) of the new group; empty for all ranks. Other ranks
            need not make this object.
    """

    def __init__(self, group: Any | None = None, *, members: Sequence[int] = ()) -> None:
        if group is None and members and len(members) < dist.get_world_size():
            group = _new_group(members, _time_out())
        elif group is None:
            group = dist.new_group(timeout=_time_out(), backend="gloo")
        elif dist.get_backend(group) != "gloo":
            raise StoreError(
                f"a store exchanges over a gloo group, not over {dist.get_backend(group)}: pass "
                'dist.new_group(backend="gloo"), or nothing'
            )
        self._group: Any = group
        self._pool = ThreadPoolExecutor(1, "healcore-exchange")
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    @property
    def group(self) -> Any:
        """The group; RuntimeError if the program has destroyed it."""
        if self._group not in dist.distributed_c10d._world.pg_map:
            raise RuntimeError(
                "the program has called destroy_process_group() within the Healer's block: call it "
                "after the block, because the last state is saved at its end"
            )
        return self._group

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        group, items = self.group, [None] * self.world
        # Not in the main thread: a signal handler that raises there would leave the exchange after
        # the first of its two collectives. The next exchange would meet the second collective of
        # the other ranks, and gloo would abort the process. The pool's one thread keeps the order.
        if threading.current_thread() is threading.main_thread():
            self._pool.submit(dist.all_gather_object, items, item, group).result()
        else:
            dist.all_gather_object(items, item, group)
        return items

    def largest(self, values: Sequence[int], seconds: float | None = None) -> list[int]:
        """The largest of each value (0 to 255) over the ranks: one `all_reduce` of a byte for each.

        Args:
            values: as many on every rank.
            seconds: to wait for the others, or None for the group's time-out.

        Raises:
            RuntimeError: a rank has left, or did not come in time.
        """
        found = torch.tensor(values, dtype=torch.uint8)
        work = dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group, async_op=True)
        assert work is not None  # this rank is in the group
        if seconds is None:
            work.wait()
        else:
            work.wait(timedelta(seconds=seconds))
        return found.tolist()


def _new_group(members: Sequence[int], timeout: timedelta | None) -> Any:
    """A new gloo group of `members`, made by these ranks only.

    torch (2.13) derives a group's name from the number of groups in the process, and ranks with
    different numbers would never meet. Ranks with fewer groups make groups of themselves first.
    """
    world: Any = dist.distributed_c10d._world
    store: Any = dist.distributed_c10d._get_default_store()
    ranks, here, mine = sorted(members), dist.get_rank(), len(world.pg_names)
    name = f"healcore/groups/{ranks}"
    name = f"{name}/{store.add(f'{name}/calls/{here}', 1)}"
    store.set(f"{name}/{here}", str(mine))
    keys = [f"{name}/{rank}" for rank in ranks]
    store.wait(keys, timeout or SHORTEST)
    most = max(int(store.get(key)) for key in keys)
    for _ in range(most - mine):
        dist.new_group([here], backend="gloo", use_local_synchronization=True)
    return dist.new_group(ranks, timeout, backend="gloo", use_local_synchronization=True)


def _time_out() -> timedelta | None:
    """The time-out of the default group, at least `SHORTEST`; None for torch's own default."""
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return max(SHORTEST, *(backend.options._timeout for backend in backends))
    except (AttributeError, TypeError, RuntimeError):  # a backend without a time-out
        return None


def restart_obstacle(environment: Mapping[str, str]) -> str:
    """Why restarts by torchrun may fail, by the variables that it sets, or an empty string.

    All restarts share one store then, and gloo reads addresses of killed ranks from it
    (https://github.com/pytorch/pytorch/issues/167288; torch 2.13).
    """
    restarts = environment.get("TORCHELASTIC_MAX_RESTARTS", "0")
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or restarts == "0":
        return ""
    return (
        f"torchrun may restart this run {restarts} times, and a restarted rank may read the "
        "address of its killed predecessor: start torchrun with "
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 in the environment"
    )


def initialized() -> bool:
    """Whether this process is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
