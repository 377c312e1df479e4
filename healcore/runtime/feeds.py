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


class Feeds:
    """All loaders of a run."""

    def __init__(self) -> None:
        self._loaders: list[Any] = []
        self._cursors: list[Cursor] = []
        self._starts: list[dict[str, Any]] = []
        self._resume: dict[str, Any] = {}
        self._current: int | None = None
        self._last: BatchId | None = None
        self._decided: dict[int, set[BatchId]] = {}
        self.told: list[str] = []
        """What a person should know about the data, in words; the Healer takes it away."""

    def feed(self, loader: Any, epochs: int | None) -> Cursor:
        """The cursor of a loader, good for `epochs` more epochs; the current one from now on.

        After a restart it stands where the run was: epochs that it had finished are not handed out
        again, as if the loop had gone through them.

        Raises:
            UnusableLoader: it cannot be iterated over, or not that often.
        """
        for number, each in enumerate(self._loaders):
            if each is loader:
                self._cursors[number].extend(epochs)
                break
        else:
            number = len(self._loaders)
            self._cursors.append(Cursor(loader, epochs=epochs))
            self._loaders.append(loader)
            # For a checkpoint from before this loader's first use.
            self._starts.append(self._cursors[number].position())
        self._current, self._last = number, None
        cursor = self._cursors[number]
        saved = self._resume.pop(str(number), None)
        if saved is not None and not cursor.rewind(saved):
            self.told.append(cursor.fast_forward(saved))
        cursor.leave_out(self._decided.get(number, ()))
        return cursor

    def next(self) -> tuple[Any, BatchId]:
        """The next batch of the current loader.

        Raises:
            StopIteration: its epochs are over.
        """
        assert self._current is not None, "feed comes first"
        batch, self._last = self._cursors[self._current].next()
        return batch, self._last

    @property
    def can_rewind(self) -> bool:
        """Whether the current loader can be put back."""
        return self._current is not None and self._cursors[self._current].can_rewind

    def skipped(self) -> list[BatchId]:
        """Ids left out since the last call."""
        return [] if self._current is None else self._cursors[self._current].skipped()

    def position(self) -> dict[str, Any]:
        """Where every loader is: to be saved with the step that its last batch was for."""
        return {str(number): each.position() for number, each in enumerate(self._cursors)}

    def forward(self) -> dict[str, Any]:
        """Where the loaders are that cannot be put back: it stays through a rollback. JSON-safe."""
        return {
            str(number): each.position()
            for number, each in enumerate(self._cursors)
            if not each.can_rewind
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
        cursor = self._cursors[self._current]
        # All that was ever decided: a deeper rollback comes past earlier bad windows again.
        decided = self._decided.setdefault(self._current, set())
        decided.update(self._window(bad, more))
        if position is None:
            why = "the checkpoint has no position of this loader"
        elif not cursor.can_rewind or not cursor.rewind(
            position.get(str(self._current), self._starts[self._current])
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
