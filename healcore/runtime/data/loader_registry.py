"""The cursors of all loaders of a run, whose positions are saved and restored together.

A loop calls `batches` once, or once per epoch, or with one loader after another. Loaders are
numbered in the order of their first use, so that a restarted program finds each loader again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.data import position as positions
from healcore.runtime.data.cursor import Cursor
from healcore.runtime.data.position import BatchId, DataError

_MAX_LOADERS = 8
"""Number of loaders to keep; a loop may make a new loader for every epoch."""
_COUNT = "count"
"""Key next to the positions: number of loaders so far."""
_EPOCH = "epoch"
"""Key next to the positions: epoch of the program's own loop that begins or continues here."""


class RewindResult(NamedTuple):
    """The change of the data position by a rollback."""

    rewound: bool
    why_not: str | None
    """Why the loader was not rewound, or None."""


class LoaderEntry:
    """A loader of the run.

    Attributes:
        cursor: the cursor that reads the loader.
        in_loop: whether a loop reads the loader. After a `break` the rest of the epoch is dropped.
        exhausted: whether all epochs were read before the restart.
    """

    def __init__(self, loader: Any, cursor: Cursor) -> None:
        self.loader = loader
        self.cursor = cursor
        self.in_loop = self.exhausted = False
        self.start = cursor.position()
        """Position for checkpoints that are older than the first use."""


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
        self._entries: dict[int, LoaderEntry] = {}
        self._count = 0
        self._saved: dict[str, Any] = {}
        self._saved_count = 0
        self._last: BatchId | None = None
        self._ids_to_skip: dict[int, set[BatchId]] = {}
        """Number of a loader -> the ids that its cursor skips."""
        self._epoch: int | None = None
        """The `epoch` of the last call of `begin`."""
        self._noticed: set[str | None] = set()

    def __getitem__(self, number: int) -> LoaderEntry:
        """The loader of a number."""
        return self._entries[number]

    def number(self, loader: Any) -> int | None:
        """The number of a loader, or None before its first use."""
        return next((n for n, entry in self._entries.items() if entry.loader is loader), None)

    def has_saved(self, loader: Any) -> bool:
        """Whether an earlier process has saved a position of this loader."""
        number = self.number(loader)
        return str(self._count if number is None else number) in self._saved

    def begin(self, loader: Any, epochs: int | None, epoch: int | None = None) -> int:
        """Begins to iterate over a loader for `epochs` more epochs; returns the loader's number.

        After a restart the loader continues at its saved position. After a `break` it begins the
        next epoch, as any loader does. With `epoch`, it reads this epoch only.

        Raises:
            DataError: `epoch` cannot be the next epoch of the loader.
        """
        number = self.number(loader)
        if number is None:
            number = self._count if epoch is None else self._number_in(epoch)
            self._count = number + 1
            entry = LoaderEntry(loader, Cursor(loader, epochs=epochs))
            entry.cursor.left_out = self._ids_to_skip.setdefault(number, set())
            entry.exhausted = self._saved_count > number and str(number) not in self._saved
            why_not = entry.cursor.why_not
            if why_not is not None and why_not not in self._noticed:
                self._noticed.add(why_not)
                self.notices.append(f"after rollbacks the data continues forward: {why_not}")
        else:
            entry = self._entries.pop(number)
            entry.cursor.extend(epochs)
            if entry.in_loop:
                entry.cursor.abandon()
            entry.exhausted = False
        self._entries[number] = entry  # at the end
        entry.in_loop = True
        if self.current is None:
            self.current = number
        saved = self._saved.pop(str(number), None)
        if saved is not None and not entry.cursor.rewind(saved):
            self.notices.append(entry.cursor.fast_forward(saved))
        if epoch is not None:
            entry.cursor.read_only(epoch)
            self._epoch = epoch
        elif saved is not None and entry.cursor.before_end:
            self.notices.append(
                f"epoch 0 of this loop was trained before the restart, which resumes in epoch "
                f"{saved['epoch']}; a loop that begins at an epoch of its own has to write "
                "healer.batches(loader, epoch=epoch), see healer.epochs"
            )
        while len(self._entries) > _MAX_LOADERS:
            del self._entries[next(n for n in self._entries if n not in (number, self.current))]
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

    def next(self, number: int, *, after: Exception | None = None) -> tuple[Any, BatchId]:
        """The next batch of a loader; StopIteration after its last epoch. See `Cursor.next`."""
        entry = self._entries[number]
        if entry.exhausted:
            raise StopIteration
        entry.in_loop = True
        return entry.cursor.next(after=after)

    def all_unreadable(self) -> dict[int, BatchId]:
        """The unreadable batches of all loaders, by number of the loader."""
        batches = {number: entry.cursor.unreadable for number, entry in self._entries.items()}
        return {number: batch for number, batch in batches.items() if batch is not None}

    def leave_out(self, number: int, batch: BatchId) -> None:
        """Skips a batch from now on, also after a rollback and a restart."""
        self._ids_to_skip[number].add(batch)

    def stepped(self, number: int, last: BatchId | None) -> None:
        """Makes the loader of a step's batches the current loader, which rollbacks rewind.

        Other loaders, such as the loader of an evaluation inside the loop, are not rewound.
        """
        if number in self._entries:
            self.current, self._last = number, last

    def close(self, number: int) -> None:
        """Ends the loop over this loader."""
        if number in self._entries:
            self._entries[number].in_loop = False

    def at_end(self, number: int | None) -> bool:
        """See `Cursor.at_end`."""
        entry = None if number is None else self._entries.get(number)
        return entry is not None and entry.cursor.at_end

    @property
    def names_epochs(self) -> bool:
        """Whether the program's loop passes the number of its epoch."""
        return self._epoch is not None

    @property
    def at_epochs(self) -> bool:
        """Whether all saved positions are in use, and no loader stands within a later epoch."""
        return not (self._saved or any(e.cursor.before_end for e in self._entries.values()))

    def left_at(self) -> str:
        """The place where a `break` left the loop, as part of a sentence, or an empty string."""
        entry = None if self.current is None else self._entries[self.current]
        if entry is None or not (entry.in_loop and entry.cursor.left_early):
            return ""
        (epoch, index), length = entry.cursor.next_id, entry.cursor.length
        return f"a `break` in epoch {epoch}, before batch {index} of {length},"

    @property
    def left_out_count(self) -> int:
        """Number of skipped batches of all loaders."""
        return sum(map(len, self._ids_to_skip.values()))

    @property
    def can_rewind(self) -> bool:
        """Whether the current loader can be rewound."""
        return self.current is not None and self._entries[self.current].cursor.can_rewind

    def position(self) -> dict[str, Any]:
        """The positions of all loaders, for a checkpoint."""
        positions = {
            str(number): entry.cursor.position()
            for number, entry in self._entries.items()
            if not entry.exhausted
        }
        epoch = self.next_epoch
        if self._epoch is not None:
            # While the loop reads the loader, the program's code after the epoch has not run.
            ended = self.at_end(self.current) and not self._entries[self.current].in_loop
            epoch = self._epoch + ended
        return {**positions, _COUNT: self._count, _EPOCH: epoch}

    def position_before(self, batches: Mapping[int, BatchId]) -> dict[str, Any] | None:
        """The positions before some batches, by number of the loader, or None if unreachable."""
        before = {
            str(number): self._entries[number].cursor.position_before(batch)
            for number, batch in batches.items()
            if number in self._entries
        }
        return None if None in before.values() else {**self.position(), **before}

    def forward_positions(self) -> dict[str, Any]:
        """The positions of loaders that cannot be rewound, JSON-safe. A rollback keeps them."""
        return {
            str(number): entry.cursor.position()
            for number, entry in self._entries.items()
            if not entry.cursor.can_rewind
        }

    def left_out(self) -> dict[str, list[list[int]]]:
        """Ids of all skipped batches, by number of the loader, JSON-safe."""
        return {
            str(number): [list(batch) for batch in sorted(batches)]
            for number, batches in self._ids_to_skip.items()
        }

    def check(self, position: Mapping[str, Any]) -> None:
        """Checks positions of an earlier process before `resume`.

        Raises:
            DataError: a position cannot be decoded, or the number of loaders is no whole number.
        """
        for key in (_COUNT, _EPOCH):
            value = position.get(key, 0)
            if type(value) is not int or value < 0:
                raise DataError(f"the {key} of loaders is a whole number >= 0, not {value!r:.80}")
        for number, loader_position in position.items():
            if number not in (_COUNT, _EPOCH):
                positions.decode(loader_position)

    def resume(
        self, position: Mapping[str, Any], skipped: Mapping[str, Iterable[Iterable[int]]] = {}
    ) -> None:
        """Stores positions and skipped batches of an earlier process for later calls of `begin`."""
        self._saved = dict(position)
        self._saved_count = int(self._saved.pop(_COUNT, 0))
        self.next_epoch = int(self._saved.pop(_EPOCH, 0))
        self._ids_to_skip = {int(n): {BatchId(*pair) for pair in ids} for n, ids in skipped.items()}

    def rewind(
        self,
        position: dict[str, Any] | None,
        bad: Iterable[BatchId],
        more: int,
        again: Sequence[BatchId] = (),
    ) -> RewindResult:
        """Rewinds the current loader and skips the `bad` batches and `more` after them.

        Batches to read `again` are no longer skipped.
        A loader that cannot be rewound continues forward, which also passes the bad batches.
        `position` is None if the checkpoint has no positions.
        """
        if self.current is None:
            return RewindResult(False, "the loop does not read its batches through healcore")
        entry, cursor = self._entries[self.current], self._entries[self.current].cursor
        # Earlier bad batches stay skipped, because a deeper rollback reads them again.
        cursor.left_out.update(bad)
        last = max(bad, default=self._last)
        if last is not None:
            cursor.left_out.update(BatchId(last.epoch, last.index + 1 + i) for i in range(more))
        cursor.left_out.difference_update(again)
        why = None
        if position is None:
            why = "the checkpoint has no position of this loader"
        elif not cursor.rewind(position.get(str(self.current), entry.start)):
            why = cursor.why_not or "it could not be rewound"
        else:
            entry.in_loop = False  # a `break` came after this position
        return RewindResult(why is None, why)
