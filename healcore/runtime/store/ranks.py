"""The processes that write one checkpoint together: all of them continue, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from healcore.core.errors import HealcoreError

T = TypeVar("T")


class Ranks(Protocol):
    """What a store needs to agree with the other processes of a run."""

    rank: int
    """Of this process; rank 0 names directories and writes the manifest."""
    world: int

    def gather(self, item: Any) -> list[Any]:
        """Every rank's item (picklable, small), in the order of the ranks, on every rank.

        Every rank calls it, in the same order, from one thread at a time.
        """
        ...


class Alone:
    """A run of one process."""

    rank = 0
    world = 1

    def gather(self, item: Any) -> list[Any]:
        """Only this one's item."""
        return [item]


class RankFailed(HealcoreError, OSError):
    """Another rank raised an error, whose message is part of this one, or does not answer."""


def agreed(ranks: Ranks, mine: Any) -> Any:
    """Rank 0's item, on every rank."""
    return ranks.gather(mine)[0]


def together(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Runs an action on every rank; the results of all (picklable), or an error on all.

    If only the rank that failed raised, the others would wait for it in their next exchange. The
    failed rank raises its own error, the others RankFailed.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    text = None if failure is None else f"{type(failure).__name__}: {failure}"
    outcomes = ranks.gather((result, text))
    if failure is not None:
        raise failure
    for rank, (_, theirs) in enumerate(outcomes):
        if theirs is not None:
            raise RankFailed(f"rank {rank}: {theirs}")
    return [outcome for outcome, _ in outcomes]


def united(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The names of all ranks, each once, in one order."""
    return tuple(sorted({name for each in names for name in each}))


def on_each(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on every rank, each keeping its own result; or an error on all."""
    results: list[T] = []
    together(ranks, lambda: results.append(action()))
    return results[0]


def on_first(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on rank 0 only; its result, or an error, on every rank."""
    nothing: Callable[[], Any] = lambda: None  # noqa: E731
    return together(ranks, action if ranks.rank == 0 else nothing)[0]
