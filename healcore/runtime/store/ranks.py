"""Exchanges between the processes that write one checkpoint together.

After each exchange all processes continue or all processes raise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.store.checkpoints import CheckpointDamaged, SaveFailed, StoreError

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, which exchange small items.

    Implemented by the adapters, over a process group of torch or the coordination service of JAX;
    `Alone` is the implementation for one process. Used by one thread at a time.
    """

    rank: int
    """Number of this process. Rank 0 names directories and writes the manifest."""
    world: int
    """Number of processes."""

    def gather(self, item: T) -> list[T]:
        """Exchanges an item of each rank.

        Collective: every rank calls it, in the same order, from one thread at a time.

        Args:
            item: small and picklable.

        Returns:
            The items of all ranks in rank order.
        """
        ...


class Alone:
    """A run of one process, which exchanges nothing."""

    rank = 0
    world = 1

    def gather(self, item: T) -> list[T]:
        """A list of the item."""
        return [item]


class RankFailed(HealcoreError, OSError):
    """Another rank raised an error, which this message quotes, or does not answer."""

    __module__ = "healcore.errors"


def broadcast(ranks: Ranks, mine: T) -> T:
    """Sends the item of rank 0 to every rank. Collective.

    Args:
        ranks: all of them call this function.
        mine: the item of this rank. Only the item of rank 0 is used.

    Returns:
        Rank 0's item.
    """
    return ranks.gather(mine)[0]


def run_on_each(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on every rank, whose result need not be exchanged. Collective.

    If only the failed rank raised, the other ranks would wait for it in their next exchange. So:

        an action raises                     the failed rank raises   the other ranks raise
        -----------------------------------  -----------------------  ---------------------
        a StoreError other than SaveFailed   the error                the same error
        any other error                      the error                RankFailed

    If several ranks fail, CheckpointDamaged is raised only if every error is CheckpointDamaged,
    because the caller then tries another copy.

    Args:
        ranks: all of them call this function.
        action: what to do on this rank. It does not exchange anything itself.

    Returns:
        This rank's result.
    """
    result: Any = None
    failure: Exception | None = None
    shared: Exception | None = None
    try:
        result = action()
    except Exception as error:
        failure = shared = error
        if not isinstance(error, StoreError) or isinstance(error, SaveFailed):
            # Only a StoreError can certainly be pickled.
            shared = RankFailed(f"rank {ranks.rank}: {type(error).__name__}: {error}")
    failures = [error for error in (failure, *ranks.gather(shared)) if error is not None]
    if failures:  # this rank's error comes before its copy
        raise min(failures, key=lambda error: isinstance(error, CheckpointDamaged))
    return result


def run_on_first(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on rank 0 only, such as a change of the directory. Collective.

    Args:
        ranks: all of them call this function.
        action: what to do on rank 0. Its result is picklable.

    Returns:
        Its result, on every rank. If it fails, all ranks raise, see `run_on_each`.
    """
    mine: Any = run_on_each(ranks, lambda: action() if ranks.rank == 0 else None)
    return broadcast(ranks, mine)
