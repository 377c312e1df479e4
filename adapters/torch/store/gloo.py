"""The ranks of a torch process group, as stores see them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from healcore.runtime.store.errors import StoreError


class GlooRanks:
    """Exchanges over a gloo group of its own.

    Saving exchanges from a background thread, and would interfere with the training in its group.
    Without a `group` (gloo, used by nothing else) a new one is made, of `members` (ranks of the
    default group) or of all ranks, which is why each of these makes its store at the same place in
    the program. Other ranks than `members` need not know of it.
    """

    def __init__(self, group: Any | None = None, *, members: Sequence[int] = ()) -> None:
        if group is None and members and len(members) < dist.get_world_size():
            group = dist.new_group([*members], backend="gloo", use_local_synchronization=True)
        elif group is None:
            group = dist.new_group(backend="gloo")
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


def initialized() -> bool:
    """Whether this program is one of several ranks."""
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
