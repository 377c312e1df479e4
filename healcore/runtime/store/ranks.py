"""Exchanges between the processes that write one checkpoint together.

After each exchange either all processes continue, or all raise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

from healcore.core.errors import HealcoreError
from healcore.runtime.store.errors import CheckpointDamaged, SaveFailed, StoreError

T = TypeVar("T")


class Ranks(Protocol):
    """The processes of a run, which exchange small items."""

    rank: int
    """Number of this process. Rank 0 names directories and writes the manifest."""
    world: int
    """Number of processes."""

    def gather(self, item: Any) -> list[Any]:
        """The items of all ranks (picklable, small), in the order of the ranks.

        Every rank calls it, in the same order, from one thread at a time.
        """
        ...


class Alone:
    """A run of one process."""

    rank = 0
    world = 1

    def gather(self, item: Any) -> list[Any]:
        """The only item."""
        return [item]


class RankFailed(HealcoreError, OSError):
    """Another rank raised an error, whose message is part of this message, or does not answer."""


def agreed(ranks: Ranks, mine: Any) -> Any:
    """Rank 0's item, on every rank."""
    return ranks.gather(mine)[0]


def together(ranks: Ranks, action: Callable[[], T]) -> list[T]:
    """Runs an action on every rank; returns the results of all (picklable), or raises on all.

    If only the failed rank raised, the others would wait for it in their next exchange. All ranks
    raise a StoreError. For any other error the failed rank raises the error itself and the others
    raise RankFailed. CheckpointDamaged is raised only if all errors are damage, because the caller
    tries another copy then.
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
    """An error as the other ranks raise it. Only a StoreError can certainly be pickled."""
    if failure is None or (isinstance(failure, StoreError) and not isinstance(failure, SaveFailed)):
        return failure
    return RankFailed(f"rank {rank}: {type(failure).__name__}: {failure}")


def united(names: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """The names of all ranks, sorted, each once."""
    return tuple(sorted({name for each in names for name in each}))


def on_each(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on every rank; returns this rank's result, or raises on all ranks."""
    results: list[T] = []
    together(ranks, lambda: results.append(action()))
    return results[0]


def on_first(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs an action on rank 0; returns its result, or raises its error, on every rank."""
    nothing: Callable[[], Any] = lambda: None  # noqa: E731
    return together(ranks, action if ranks.rank == 0 else nothing)[0]
