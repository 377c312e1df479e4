"""The cursors of all loaders of a run, whose positions are saved and restored together.

A loop calls `batches` once, or once per epoch, or with one loader after another. Loaders are
numbered in the order of their first use, so that a restarted program finds each loader again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.data import position as positions
from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.position import BatchId, DataError

_MAX_LOADERS = 8  # to keep; a loop may make a new loader for every epoch
# Keys next to the positions: the number of loaders so far, and the epoch of the program's own loop
# that begins or continues here.
_COUNT, _EPOCH = "count", "epoch"


class RewindResult(NamedTuple):
    """The change of the data position by a rollback, or the reason why it did not change."""

    rewound: bool
    why_not: str | None


class LoaderRegistry:
    """All loaders of a run.

    Attributes:
        notices: sentences for the log; the Healer clears them.
        current: number of the loader of the last step, or of the first loader.
        next_epoch: epoch at which the program's own loop continues after a restart.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.current: int | None = None
        self.next_epoch = 0
        # By number of the loader:
        self._cursors: dict[int, Cursor] = {}  # in the order of their last use
        self._starts: dict[int, dict[str, Any]] = {}  # for checkpoints older than the first use
        self._in_loop: set[int] = set()  # a `break` drops the rest of their epoch
        self._finished: set[int] = set()  # all epochs were read before the restart
        self._ids_to_skip: defaultdict[int, set[BatchId]] = defaultdict(set)
        self._count = 0
        self._saved: dict[str, Any] = {}
        self._saved_count = 0
        self._last: BatchId | None = None
        self._epoch: int | None = None  # the `epoch` of the last call of `begin`
        self._noticed: set[str] = set()

    def __getitem__(self, number: int) -> Cursor:
        """The cursor of a loader's number."""
        return self._cursors[number]

    def number(self, loader: Any) -> int | None:
        """The number of a loader, or None before its first use."""
        return next((n for n, cursor in self._cursors.items() if cursor.loader is loader), None)

    def has_saved(self, loader: Any) -> bool:
        """Whether an earlier process has saved a position of this loader."""
        number = self.number(loader)
        return str(self._count if number is None else number) in self._saved

    def begin(self, loader: Any, epochs: int | None, epoch: int | None = None) -> int:
        """Begins to iterate over a loader for `epochs` more epochs; returns the loader's number.

        After a restart the loader continues at its saved position. After a `break` it begins the
        next epoch, as any loader does. With `epoch`, it reads this epoch only (`read_only`).
        """
        number = self.number(loader)
        if number is None:
            number = self._count if epoch is None else self._number_in(epoch)
            cursor = Cursor(loader, epochs=epochs)
            cursor.left_out = self._ids_to_skip[number]
            self._count, self._starts[number] = number + 1, cursor.position()
            if self._saved_count > number and str(number) not in self._saved:
                self._finished.add(number)
            notice = f"after rollbacks the data continues forward: {cursor.why_not}"
            if not cursor.can_rewind and notice not in self._noticed:
                self._noticed.add(notice)
                self.notices.append(notice)
        else:
            cursor = self._cursors.pop(number)
            cursor.extend(epochs)
            if number in self._in_loop:
                cursor.abandon()
            self._finished.discard(number)
        self._cursors[number] = cursor  # at the end
        self._in_loop.add(number)
        if self.current is None:
            self.current = number
        saved = self._saved.pop(str(number), None)
        if saved is not None and not cursor.rewind(saved):
            self.notices.append(cursor.fast_forward(saved))
        if epoch is not None:
            cursor.read_only(epoch)
            self._epoch = epoch
        elif saved is not None and cursor.before_end:
            self.notices.append(
                f"epoch 0 of this loop was trained before the restart, which resumes in epoch "
                f"{saved['epoch']}; a loop that begins at an epoch of its own has to write "
                "healer.batches(loader, epoch=epoch), see healer.epochs"
            )
        while len(self._cursors) > _MAX_LOADERS:
            del self._cursors[next(n for n in self._cursors if n not in (number, self.current))]
        return number

    def _number_in(self, epoch: int) -> int:
        """Number of a loader whose first use in this process is in `epoch` of the loop.

        A loop that makes a loader for every epoch does not make those of earlier epochs again.
        """
        begun = {
            int(number): each["epoch"]
            for number, each in self._saved.items()
            if each["index"] > 0 and epoch - 1 <= each["epoch"] <= epoch
        }
        if self._count in begun:
            return self._count
        return max(begun, key=lambda number: (begun[number], number), default=self._count)

    def next(self, number: int) -> tuple[Any, BatchId]:
        """The next batch of a loader; StopIteration after its last epoch. See `Cursor.next`."""
        if number in self._finished:
            raise StopIteration
        self._in_loop.add(number)
        return self._cursors[number].next()

    def all_unreadable(self) -> dict[int, BatchId]:
        """The unreadable batches of all loaders, by number of the loader."""
        batches = {number: cursor.unreadable for number, cursor in self._cursors.items()}
        return {number: batch for number, batch in batches.items() if batch is not None}

    def stepped(self, number: int, last: BatchId | None) -> None:
        """Makes the loader of a step's batches the current loader, which rollbacks rewind.

        Other loaders, such as the loader of an evaluation inside the loop, are not rewound.
        """
        if number in self._cursors:
            self.current, self._last = number, last

    def close(self, number: int) -> None:
        """Ends the loop over this loader."""
        self._in_loop.discard(number)

    def at_end(self, number: int | None) -> bool:
        """See `Cursor.at_end`."""
        return number is not None and number in self._cursors and self._cursors[number].at_end

    @property
    def names_epochs(self) -> bool:
        """Whether the program's loop passes the number of its epoch."""
        return self._epoch is not None

    @property
    def at_epochs(self) -> bool:
        """Whether all saved positions are in use, and no loader stands within a later epoch."""
        return not (self._saved or any(each.before_end for each in self._cursors.values()))

    def left_at(self) -> str:
        """The place where a `break` left the loop, as part of a sentence, or an empty string."""
        number = self.current
        return self[number].break_place if number is not None and number in self._in_loop else ""

    @property
    def can_rewind(self) -> bool:
        """Whether the current loader can be rewound."""
        return self.current is not None and self[self.current].can_rewind

    def position(self) -> dict[str, Any]:
        """The positions of all loaders, for a checkpoint."""
        unfinished = {n: each for n, each in self._cursors.items() if n not in self._finished}
        positions = {str(number): cursor.position() for number, cursor in unfinished.items()}
        epoch = self.next_epoch
        if self._epoch is not None:
            # While the loop reads the loader, the program's code after the epoch has not run.
            epoch = self._epoch + (self.at_end(self.current) and self.current not in self._in_loop)
        return {**positions, _COUNT: self._count, _EPOCH: epoch}

    def position_before(self, batches: Mapping[int, BatchId]) -> dict[str, Any] | None:
        """The positions before some batches, by number of the loader, or None if unreachable."""
        there = {n: each for n, each in batches.items() if n in self._cursors}
        before = {str(n): self[n].position_before(each) for n, each in there.items()}
        return None if None in before.values() else {**self.position(), **before}

    def forward_positions(self) -> dict[str, Any]:
        """The positions of loaders that cannot be rewound, JSON-safe. A rollback keeps them."""
        forward = {n: each for n, each in self._cursors.items() if not each.can_rewind}
        return {str(number): cursor.position() for number, cursor in forward.items()}

    def left_out(self) -> dict[str, list[list[int]]]:
        """Ids of all skipped batches, by number of the loader, JSON-safe."""
        return {
            str(number): [list(batch) for batch in sorted(batches)]
            for number, batches in self._ids_to_skip.items()
        }

    def skipped_ids(self) -> frozenset[BatchId]:
        """Ids of all skipped batches, of any loader."""
        return frozenset().union(*self._ids_to_skip.values())

    def check(self, position: Mapping[str, Any]) -> None:
        """Checks positions of an earlier process before `resume`. Raises DataError."""
        for key, value in {_COUNT: 0, _EPOCH: 0, **position}.items():
            if key not in (_COUNT, _EPOCH):
                positions.decode(value)
            elif type(value) is not int or value < 0:
                raise DataError(f"the {key} of loaders is a whole number >= 0, not {value!r:.80}")

    def resume(
        self, position: Mapping[str, Any], skipped: Mapping[str, Iterable[Iterable[int]]] = {}
    ) -> None:
        """Stores positions and skipped batches of an earlier process for later calls of `begin`."""
        self._saved = dict(position)
        self._saved_count = int(self._saved.pop(_COUNT, 0))
        self.next_epoch = int(self._saved.pop(_EPOCH, 0))
        for number, ids in skipped.items():
            self._ids_to_skip[int(number)] = {BatchId(*pair) for pair in ids}

    def rewind(
        self,
        position: dict[str, Any] | None,
        bad: Iterable[BatchId],
        more: int,
        again: Sequence[BatchId] = (),
    ) -> RewindResult:
        """Rewinds the current loader and skips the `bad` batches and `more` after them.

        Batches to read `again` are no longer skipped. A loader that cannot be rewound continues
        forward, past the bad batches. `position` is None if the checkpoint has no position.
        """
        if self.current is None:
            return RewindResult(False, "the loop does not read its batches through healcore")
        number, cursor = self.current, self[self.current]
        # Earlier bad batches stay skipped, because a deeper rollback reads them again.
        cursor.left_out.update(bad)
        last = max(bad, default=self._last)
        if last is not None:
            cursor.left_out.update(BatchId(last.epoch, last.index + 1 + i) for i in range(more))
        cursor.left_out.difference_update(again)
        if position is None:
            return RewindResult(False, "the checkpoint has no position of this loader")
        if not cursor.rewind(position.get(str(number), self._starts[number])):
            return RewindResult(False, cursor.why_not or "it could not be rewound")
        self._in_loop.discard(number)  # a `break` came after this position
        return RewindResult(True, None)
