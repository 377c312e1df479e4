"""The loaders of a run: one cursor each, positions saved and restored together.

A loop calls `batches` once, or once per epoch, or with one loader after another. Cursors are kept
by loader and numbered in the order of their first use, so that a program that is started again
finds each of its loaders where it was.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from healcore.runtime.data import BatchId, Cursor


class Moved(NamedTuple):
    """What a rollback did to the data."""

    rewound: bool
    why_not: str | None
    """In words, where it was not."""
    left_out: tuple[BatchId, ...]
    """All ids of this loader that a rollback has decided not to hand out (again)."""


_KEPT = 8
"""Loaders whose place is kept; a loop that makes a new one for every epoch has no end of them."""
_COUNT = "count"
"""Beside the positions: how many loaders there have been."""


class Feed:
    """One loader's cursor."""

    def __init__(self, loader: Any, cursor: Cursor) -> None:
        self.loader = loader
        self.cursor = cursor
        self.start = cursor.position()
        """For a checkpoint from before its first use."""
        self.open = False
        """A loop is going through it, or has broken off."""
        self.over = False
        """It had been used up before the restart."""


class Feeds:
    """All loaders of a run.

    Args:
        trust: as in `Cursor`.
    """

    def __init__(self, *, trust: bool = False) -> None:
        self._trust = trust
        self._feeds: dict[int, Feed] = {}
        self._count = 0
        self._resume: dict[str, Any] = {}
        self._resume_count = 0
        self._current: int | None = None
        self._last: BatchId | None = None
        self._decided: dict[int, set[BatchId]] = {}
        self._known: set[str | None] = set()
        self.told: list[str] = []
        """What a person should know about the data, in words; the Healer takes it away."""

    def feed(self, loader: Any, epochs: int | None) -> int:
        """A loop begins to go through a loader, for `epochs` more epochs.

        After a restart it stands where the run was: epochs that it had finished are not handed out
        again, as if the loop had gone through them. After a `break` it begins the next epoch, as
        any loader does.

        Args:
            loader: whose batches.
            epochs: how many; None for no end.

        Returns:
            Its number, for `next`.

        Raises:
            UnusableLoader: it cannot be iterated over, or not that often.
        """
        number = next((n for n, each in self._feeds.items() if each.loader is loader), None)
        if number is None:
            number, self._count = self._count, self._count + 1
            feed = self._feeds[number] = Feed(
                loader, Cursor(loader, epochs=epochs, trust=self._trust)
            )
            feed.over = self._resume_count > number and str(number) not in self._resume
            if not feed.cursor.can_rewind and feed.cursor.why_not not in self._known:
                self._known.add(feed.cursor.why_not)
                self.told.append(f"after a rollback it goes on forward: {feed.cursor.why_not}")
        else:
            feed = self._feeds[number] = self._feeds.pop(number)  # the last used comes last
            feed.cursor.extend(epochs)
            if feed.open:
                feed.cursor.abandon()
            feed.over = False
        feed.open = True
        if self._current is None:
            self._current = number
        saved = self._resume.pop(str(number), None)
        if saved is not None and not feed.cursor.rewind(saved):
            self.told.append(feed.cursor.fast_forward(saved))
        feed.cursor.leave_out(self._decided.get(number, ()))
        while len(self._feeds) > _KEPT:
            del self._feeds[next(n for n in self._feeds if n not in (number, self._current))]
        return number

    def next(self, number: int) -> tuple[Any, BatchId]:
        """The next batch of a loader.

        Raises:
            StopIteration: its epochs are over.
        """
        feed = self._feeds[number]
        if feed.over:
            raise StopIteration
        return feed.cursor.next()

    def stepped(self, number: int, last: BatchId | None) -> None:
        """A step was taken with batches of this loader: it is the one to be rewound.

        Others (an evaluation inside the loop) are gone through as they are.
        """
        if number in self._feeds:
            self._current, self._last = number, last

    def close(self, number: int) -> None:
        """The loop has gone through it."""
        if number in self._feeds:
            self._feeds[number].open = False

    @property
    def current(self) -> int | None:
        """The loader that steps were last taken with, or the first one."""
        return self._current

    @property
    def can_rewind(self) -> bool:
        """Whether the current loader can be put back."""
        return self._current is not None and self._cursor.can_rewind

    @property
    def _cursor(self) -> Cursor:
        assert self._current is not None
        return self._feeds[self._current].cursor

    def skipped(self, number: int) -> list[BatchId]:
        """Ids left out since the last call."""
        return self._feeds[number].cursor.skipped()

    def position(self) -> dict[str, Any]:
        """Where every loader is: to be saved with the step that its last batch was for."""
        places = {
            str(number): each.cursor.position()
            for number, each in self._feeds.items()
            if not each.over
        }
        return {**places, _COUNT: self._count}

    def forward(self) -> dict[str, Any]:
        """Where the loaders are that cannot be put back: it stays through a rollback. JSON-safe."""
        return {
            str(number): each.cursor.position()
            for number, each in self._feeds.items()
            if not each.cursor.can_rewind
        }

    def left_out(self, bad: Iterable[BatchId] = (), more: int = 0) -> dict[str, list[list[int]]]:
        """All ids that were ever decided to be left out, by number of the loader. JSON-safe.

        Args:
            bad: ids of another bad window in the current loader.
            more: how many batches after it to leave out besides.
        """
        found = {number: set(ids) for number, ids in self._decided.items()}
        if self._current is not None:
            found.setdefault(self._current, set()).update(self._window(bad, more))
        return {str(number): [list(i) for i in sorted(ids)] for number, ids in found.items()}

    def resume(
        self, position: Mapping[str, Any], without: Mapping[str, Iterable[Iterable[int]]] = {}
    ) -> None:
        """Takes over positions of an earlier process; loaders come when `feed` is called.

        Args:
            position: as saved.
            without: what `left_out` gave.
        """
        self._resume = dict(position)
        self._resume_count = int(self._resume.pop(_COUNT, 0))
        self._decided = {int(n): {BatchId(*each) for each in ids} for n, ids in without.items()}

    def go_back(self, position: dict[str, Any] | None, bad: Iterable[BatchId], more: int) -> Moved:
        """Rewinds the current loader to a checkpoint and leaves the bad window out.

        A loader that cannot be rewound goes on forward, which leaves the bad window behind too.

        Args:
            position: as saved; None: the checkpoint has none.
            bad: ids of the bad window.
            more: how many batches after it to leave out besides.
        """
        if self._current is None:
            return Moved(False, "the loop takes its batches from elsewhere", ())
        cursor = self._cursor
        # All that was ever decided: a deeper rollback comes past earlier bad windows again.
        decided = self._decided.setdefault(self._current, set())
        decided.update(self._window(bad, more))
        if position is None:
            why = "the checkpoint has no position of this loader"
        elif not cursor.can_rewind or not cursor.rewind(
            position.get(str(self._current), self._feeds[self._current].start)
        ):
            why = cursor.why_not or "it could not be rewound"
        else:
            why = None
        cursor.leave_out(decided)
        return Moved(why is None, why, tuple(sorted(decided)))

    def _window(self, bad: Iterable[BatchId], more: int) -> list[BatchId]:
        ids = list(bad)
        last = max(ids, default=self._last)
        if last is not None:
            ids += [BatchId(last.epoch, last.index + 1 + i) for i in range(more)]
        return ids
