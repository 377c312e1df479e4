"""The ranks of a torch process group, as stores see them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
            group = dist.new_group(
                [*members], _time_out(), backend="gloo", use_local_synchronization=True
            )
        elif group is None:
            group = dist.new_group(timeout=_time_out(), backend="gloo")
        elif dist.get_backend(group) != "gloo":
            raise StoreError(
                f"a store exchanges over a gloo group, not over {dist.get_backend(group)}: pass "
                'dist.new_group(backend="gloo"), or nothing'
            )
        self.group: Any = group
        self.rank = dist.get_rank(group)
        self.world = dist.get_world_size(group)

    def renew(self, seconds: float) -> None:
        """Replaces the group by a new one, whose exchanges raise after so many seconds.

        For ranks whose old group is unusable because one of them has left it. Collective.
        """
        self.group = dist.new_group(
            dist.get_process_group_ranks(self.group),
            backend="gloo",
            timeout=timedelta(seconds=seconds),
            use_local_synchronization=True,
        )

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item, on every rank."""
        items: list[Any] = [None] * self.world
        dist.all_gather_object(items, item, group=self.group)
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
