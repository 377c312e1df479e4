"""The processes that write one checkpoint together: all of them continue, or all raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.store.errors import CheckpointDamaged, SaveFailed, StoreError

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

    If only the rank that failed raised, the others would wait for it in their next exchange. Every
    rank raises the same kind of StoreError. For another error the failed rank raises its own, the
    others RankFailed. Of several errors all raise one that is no damage: after damage they try
    another copy.
    """
    result, failure = None, None
    try:
        result = action()
    except Exception as error:
        failure = error
    outcomes = ranks.gather((result, _sent(failure, ranks.rank)))
    failures = [failure, *(theirs for _, theirs in outcomes)]
    failures = [each for each in failures if each is not None]
    if failures:
        raise min(failures, key=lambda each: isinstance(each, CheckpointDamaged))
    return [outcome for outcome, _ in outcomes]


def _sent(failure: Exception | None, rank: int) -> Exception | None:
    """An error as other ranks raise it. Only a StoreError can certainly be pickled."""
    if failure is None or (isinstance(failure, StoreError) and not isinstance(failure, SaveFailed)):
        return failure
    return RankFailed(f"rank {rank}: {type(failure).__name__}: {failure}")


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
