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
"""Ranks write their parts of a checkpoint at different speeds, and wait for the slowest."""


class GlooRanks:
    """Exchanges over a gloo group of its own.

    Saving exchanges from a background thread, and would interfere with the training in its group.
    Without a `group` (gloo, used by nothing else) a new one is made, of `members` (ranks of the
    default group) or of all ranks, which is why each of these makes its store at the same place in
    the program. Other ranks than `members` need not know of it.

    Its exchanges wait for a rank as long as the training does: the time-out of the default group,
    at least `SHORTEST`.
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
        # In another thread than the main one: Python calls handlers of signals there, and one that
        # raises would leave the exchange after the first of its two collectives. The next exchange
        # would meet the second one on the other ranks, at which gloo aborts the process. The pool
        # has one thread, so the next exchange waits for this one.
        if threading.current_thread() is threading.main_thread():
            self._pool.submit(dist.all_gather_object, items, item, group).result()
        else:
            dist.all_gather_object(items, item, group)
        return items

    def largest(self, values: Sequence[int], seconds: float | None = None) -> list[int]:
        """The largest of each value (0 to 255) over the ranks: one `all_reduce` of a byte for each.

        Args:
            values: as many on every rank.
            seconds: to wait for the others; None: the group's time-out.

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
    """A new gloo group of `members`, of which the other ranks need not know.

    torch (2.13) derives its name from the number of groups that a process has, and ranks with
    different numbers would never meet. So those with fewer make some of themselves alone first.
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
    """Of the default group, which `new_group` does not ask; None: torch's own default."""
    group: Any = dist.group.WORLD
    try:
        backends = [group._get_backend(device) for device in group._device_types]
        return max(SHORTEST, *(backend.options._timeout for backend in backends))
    except (AttributeError, TypeError, RuntimeError):  # a backend without a time-out
        return None


def restart_obstacle(environment: Mapping[str, str]) -> str:
    """Why restarts by torchrun may fail, by the variables that it sets; "": there is no reason.

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
    """Whether this program is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
