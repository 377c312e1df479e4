"""The loaders of a run, whose positions are saved and restored together.

A loop calls `batches` once, or once per epoch, or with one loader after another. Loaders are
numbered in the order of their first use, so that a restarted program finds each loader again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healcore.runtime.data.cursor import Cursor, ReadRetries
from healcore.runtime.data.loader_adapters import BatchId, DataError, decode_position
from healcore.runtime.data.scan_blocks import ScanBlocks

MODEL_CHANGED = (
    "the program would change the structure of its model again at the begin of that epoch"
)
"""Reason of a rollback after which a loop over `Healer.epochs` does not return."""
EPOCH_LOST = "each epoch has a loader of its own, so the rest of the earlier epoch is lost"
"""Reason of a rollback after which only the steps of the current loader are repeated."""

_MAX_LOADERS = 8  # to keep; a loop may make a new loader for every epoch
# Keys next to the positions: the number of loaders so far, and the epoch of the program's own loop
# that begins or continues here.
_COUNT, _EPOCH = "count", "epoch"


class RunLoader(Cursor):
    """The cursor of a run's loader, and the use of its batches.

    Attributes:
        number: number of the loader, in the order of first use.
        start: the position before the first batch, for checkpoints older than the first use.
        first_epoch: the epoch of the program's loop in which the loader was first used.
        order: number of loaders that were first used before it in that epoch.
        exhausted_before: whether an earlier process has read all epochs.
        in_loop: whether a loop reads the loader. A `break` drops the rest of the epoch.
        left_by_break: whether a `break` has followed the last batch.
        trains: whether a step has used its batches. Others are read from the start after a restart.
        in_use: whether the loop is still using the last batch.
        pending_ids: ids of the batches since the last step.
        contents: the batches since the last step, if weights are compared.
        substitute: the batch that replaces an unreadable batch, with several ranks.
    """

    def __init__(
        self,
        number: int,
        loader: Any,
        epochs: int | None,
        skipped_batch_ids: set[BatchId],
        limit: Callable[[int], int] | None,
        retries: ReadRetries | None = None,
    ) -> None:
        super().__init__(loader, epochs=epochs, retries=retries)
        self.number = number
        self.limit = limit
        self.skipped_batch_ids = skipped_batch_ids
        self.start = self.position()
        self.first_epoch = self.order = 0
        self.exhausted_before = self.in_use = self.trains = self.left_by_break = False
        self.in_loop = True
        self.pending_ids: list[BatchId] = []
        self.contents: list[Any] = []
        self.substitute: Any = None

    @property
    def is_scan(self) -> bool:
        """Whether the batches are blocks of `Healer.scan`, of which a rollback skips none."""
        return isinstance(self.loader, ScanBlocks)

    @property
    def first_pending(self) -> BatchId | None:
        """The first batch that was read since the last step, also if reading it has raised."""
        return self.pending_ids[0] if self.pending_ids else self.unreadable

    def next(self) -> tuple[Any, BatchId]:
        """See `Cursor.next`. Raises StopIteration if an earlier process has read all epochs.

        After its last block a scan does not begin another epoch, so that a restart with more
        updates continues there.
        """
        if self.exhausted_before or (self.is_scan and self.loader.is_finished):
            raise StopIteration
        self.in_loop, self.left_by_break = True, False
        return super().next()


class LoaderRegistry:
    """All loaders of a run.

    Attributes:
        notices: sentences for the log; the Healer clears them.
        inform: called with lines about the progress of a long read.
        retries: the attempts to read a batch after failures in the network, or None for one.
        last_trained: the loader of the last step, or the first loader. Rollbacks rewind it, and the
            other loaders that a loop reads for steps, but not the loader of an evaluation.
        next_epoch: epoch at which the program's own loop continues after a restart. While the code
            after an epoch runs, still that epoch, which has no batch left.
        names_epochs: whether the program's loop passes the number of its epoch.
        can_return: whether a loop over `Healer.epochs` runs, which can return to an earlier epoch.
        returns_to: epoch to which this loop returns because of a rollback, or None. Until then the
            passes of the loaders that were rewound have no further batch.
        crossed: epoch that a loop was in when the last rewind has led it into an earlier epoch, to
            which it does not return, or None.
        changed_in: epoch in which the program has last changed the structure of its model, or -1. A
            loop over `Healer.epochs` returns to later epochs only.
    """

    def __init__(self) -> None:
        self.notices: list[str] = []
        self.inform: Callable[[str], object] = lambda line: None
        self.retries: ReadRetries | None = None
        self.last_trained: RunLoader | None = None
        self.next_epoch = 0
        self.names_epochs = self.can_return = False
        self.returns_to: int | None = None
        # Of the last such return the positions, and the new loaders since the epoch has begun.
        self._returned: Mapping[str, Any] = {}
        self._new_in_epoch = 0
        self.crossed: int | None = None
        self.changed_in = -1
        self._loaders: list[RunLoader] = []  # in the order of their last use
        self._skipped: defaultdict[int, set[BatchId]] = defaultdict(set)  # by number
        self._count = 0
        self._saved: dict[str, Any] = {}
        self._saved_count = 0
        self._completed: list[Any] = []  # loaders of a completed run, which are not read again
        self._is_short = False  # whether a loader ends before its saved position
        self._noticed: set[str] = set()

    def __iter__(self) -> Iterator[RunLoader]:
        return iter(self._loaders)

    @property
    def is_empty(self) -> bool:
        """Whether the run has used no loader, in this and in earlier processes."""
        return self.last_trained is None and not self._saved_count

    @property
    def place(self) -> BatchId:
        """Epoch and index of the batch in use, or of the next one between two batches.

        In a loop over `Healer.epochs` the epoch is that of the loop, also after its last batch.
        """
        loader = self.last_trained
        if loader is not None and loader.in_use and loader.last_id is not None:
            place = loader.last_id
        elif loader is not None:
            place = loader.next_id
        else:
            saved = [BatchId(at["epoch"], at["index"]) for at in self._saved.values()]
            place = max(saved, default=BatchId(self.next_epoch, 0))
        if not self.can_return:
            return place
        epoch = self.next_epoch if self.returns_to is None else self.returns_to
        return BatchId(epoch, place.index if place.epoch == epoch else 0)

    def find(self, loader: Any) -> RunLoader | None:
        """The cursor of a loader, or None before its first use."""
        return next((known for known in self._loaders if known.loader is loader), None)

    def count_from(self, number: int) -> None:
        """Sets the next new loader's number, if no loader of an earlier epoch is made again."""
        self._count = max(self._count, number)
        self._saved = {key: place for key, place in self._saved.items() if int(key) >= number}

    def saved_position(self, loader: Any, epoch: int | None = None) -> dict[str, Any] | None:
        """The position that an earlier process has saved for this loader in `epoch`, or None."""
        known = self.find(loader)
        return self._saved.get(str(self._number_in(epoch) if known is None else known.number))

    def is_of_completed_run(self, loader: Any, epoch: int | None = None) -> bool:
        """Whether a completed run has trained with this loader, which is numbered as in `begin`."""
        known = self.find(loader)
        if known is not None:
            return known.trains
        if any(loader is each for each in self._completed):
            return True
        number = self._number_in(epoch)
        saved = self._saved.get(str(number))
        if saved is None:  # an earlier process has read all of its batches, or it is new
            has_trained = number < self._saved_count
        else:
            has_trained = (saved["epoch"], saved["index"]) > (0, 0)
        if has_trained:
            self._completed.append(loader)
            self._count = max(self._count, number + 1)
        return has_trained

    def pass_over_completed(self) -> None:
        """Numbers the next new loader after those that a completed run has trained with.

        Call it where the program's loop is left out, so that it does not name its loaders.
        """
        for number, saved in self._saved.items():
            if (saved["epoch"], saved["index"]) > (0, 0):
                self._count = max(self._count, int(number) + 1)

    def begin(
        self,
        loader: Any,
        epochs: int | None,
        epoch: int | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> RunLoader:
        """Begins to iterate over a loader for `epochs` more epochs of `limit` batches at most.

        After a restart the loader continues at its saved position. After a `break` it begins the
        next epoch, as any loader does. With `epoch`, it reads this epoch only (`read_only`).
        """
        begun = self.find(loader)
        if begun is None:
            begun = self._new(loader, epochs, epoch, limit)
        else:
            self._loaders.remove(begun)
            begun.extend(epochs)
            if begun.in_loop:
                begun.abandon()
            begun.exhausted_before, begun.in_loop = False, True
        self._loaders.append(begun)
        self.last_trained = self.last_trained or begun
        saved = self._saved.pop(str(begun.number), None)
        if saved is not None:
            self._continue_at(begun, saved)
        if epoch is not None:
            resumes = saved is not None or bool(self._returned)
            begun.read_only(epoch, resumes=resumes and epoch == self.next_epoch)
            self.next_epoch = epoch
            self.names_epochs = True
        elif saved is not None and begun.beyond_last_epoch:
            self.notices.append(
                f"the run resumes in epoch {saved['epoch']}, so a pass over an earlier epoch "
                "yields no batch, and no epoch is trained twice. But the program's own code after "
                "such a pass, for example an evaluation, runs again. `for epoch in "
                "healer.epochs(n)` with batches(loader, epoch=epoch) begins at the right epoch; a "
                "loop without epochs needs batches(loader, epochs=None)"
            )
        while len(self._loaders) > _MAX_LOADERS:
            others = (each for each in self._loaders if each is not self.last_trained)
            self._loaders.remove(min(others, key=lambda each: each.trains))  # the oldest of these
        return begun

    def _new(
        self, loader: Any, epochs: int | None, epoch: int | None, limit: Callable[[int], int] | None
    ) -> RunLoader:
        """The cursor of a loader at its first use, numbered."""
        number = self._number_in(epoch)
        if epoch is not None and (old := self._made_before(epoch)) is not None:
            self._skipped[number] = self._skipped[old.number]
            if epoch == self.next_epoch and str(old.number) in self._returned:
                self._saved[str(number)] = self._returned[str(old.number)]
        new = RunLoader(number, loader, epochs, self._skipped[number], limit, self.retries)
        new.inform = self.inform
        new.first_epoch, new.order = epoch or 0, self._new_in_epoch
        self._new_in_epoch += 1
        new.exhausted_before = self._saved_count > number and str(number) not in self._saved
        self._count = number + 1
        notice = f"after rollbacks the data continues forward: {new.why_not}"
        if not new.can_rewind and notice not in self._noticed:
            self._noticed.add(notice)
            self.notices.append(notice)
        return new

    def _made_before(self, epoch: int) -> RunLoader | None:
        """The loader in whose place the program makes a new one, after a return to its epoch."""
        place = epoch, self._new_in_epoch
        return next((each for each in self if (each.first_epoch, each.order) == place), None)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`."""
        self.next_epoch = epoch
        self.can_return = True
        if epoch != self._returned.get(_EPOCH):  # the positions are of that epoch only
            self._returned = {}
        self._new_in_epoch = 0

    def return_to_epoch(self) -> int:
        """Ends the passes of the loaders, and returns the epoch to which the loop returns."""
        assert self.returns_to is not None
        epoch, self.returns_to = self.returns_to, None
        for loader in self:
            if loader.trains:
                loader.end_before(epoch)
        return epoch

    def _continue_at(self, begun: RunLoader, saved: dict[str, Any]) -> None:
        """Moves a loader to its position in an earlier process."""
        begun.trains = (saved["epoch"], saved["index"]) > (0, 0)
        begun.start = begun.start if begun.trains else saved
        if not begun.rewind(saved) and begun.trains:
            self.notices += filter(None, [begun.fast_forward(saved)])
        self._is_short |= begun.next_id.index > (begun.length or begun.next_id.index)

    def _number_in(self, epoch: int | None) -> int:
        """Number of a loader whose first use in this process is in `epoch` of the loop, if known.

        Loaders of earlier epochs are not made again, so their numbers are left out.
        """
        if epoch is None:
            return self._count
        saved = {int(key): BatchId(at["epoch"], at["index"]) for key, at in self._saved.items()}
        low, high = BatchId(epoch - 1, 0), BatchId(epoch + 1, 0)
        begun = {number: place for number, place in saved.items() if low < place <= high}
        furthest = max(begun.values(), default=None)
        own = begun.get(self._count)
        if own == furthest or (own is not None and own.index > 0):
            return self._count
        return max(number for number, place in begun.items() if place == furthest)

    @property
    def at_epochs(self) -> bool:
        """Whether all saved positions are in use, and no loader stands within a later epoch."""
        return not (self._saved or self._is_short or any(n.beyond_last_epoch for n in self))

    # -- positions ------------------------------------------------------------------------------

    @property
    def can_rewind(self) -> bool:
        """Whether the loaders of the steps can be rewound."""
        loaders = self._of_steps()
        return bool(loaders) and all(loader.can_rewind for loader in loaders)

    def position(self) -> dict[str, Any]:
        """The positions of all loaders, for a checkpoint."""
        read = [loader for loader in self if not loader.exhausted_before]
        unfinished = {str(n.number): n.position() if n.trains else n.start for n in read}
        return {**unfinished, _COUNT: self._count, _EPOCH: self.next_epoch}

    def position_after_step(self) -> dict[str, Any] | None:
        """The positions after the last step, or None if a loader cannot be rewound to it."""
        first = {loader: loader.first_pending for loader in self if loader.trains}
        before = {str(n.number): n.position_before(b) for n, b in first.items() if b is not None}
        return None if None in before.values() else {**self.position(), **before}

    def forward_positions(self) -> dict[str, Any]:
        """The positions of loaders that cannot be rewound, JSON-safe. A rollback keeps them."""
        return {str(n.number): n.position() for n in self if n.trains and not n.can_rewind}

    def skipped_by_loader(self) -> dict[str, list[list[int]]]:
        """Ids of all skipped batches, by number of the loader, JSON-safe."""
        return {str(n): [list(batch) for batch in sorted(ids)] for n, ids in self._skipped.items()}

    def skipped_ids(self) -> frozenset[BatchId]:
        """Ids of all skipped batches, of any loader."""
        return frozenset().union(*self._skipped.values())

    def check(self, position: Mapping[str, Any]) -> None:
        """Checks positions of an earlier process before `resume`. Raises DataError."""
        for key, value in position.items():
            if key not in (_COUNT, _EPOCH):
                decode_position(value)
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
            self._skipped[int(number)] = {BatchId(*pair) for pair in ids}

    def rewind(
        self,
        position: dict[str, Any] | None,
        bad: Collection[BatchId],
        more: int,
        again: Sequence[BatchId] = (),
    ) -> str:
        """Rewinds the loaders of the steps and skips the `bad` batches and `more` after them.

        Batches to read `again` are no longer skipped. Loaders of which one cannot be rewound
        continue forward, past the bad batches. `position` is None if the checkpoint has none.
        The ids apply to the last trained loader, and to loaders at the same batch, as in a `zip`.

        Returns:
            Reason why the loaders were not rewound, or an empty string.
        """
        loaders = self._of_steps()
        if not loaders:
            return "the loop does not read its batches through healcore"
        trained, self.crossed = loaders[0], None
        before = trained.last_id
        returns = self.can_return and position is not None and self._returns_with(position)
        last = max(bad, default=None)
        after = {BatchId(last.epoch, last.index + 1 + i) for i in range(more) if last}
        for loader in (loader for loader in loaders if loader.next_id == trained.next_id):
            # Earlier bad batches stay skipped, because a deeper rollback reads them again.
            end = loader.length
            loader.skipped_batch_ids.update(bad, (b for b in after if end is None or b.index < end))
            loader.skipped_batch_ids.difference_update(again)
        if position is None:
            return "the checkpoint has no position of this loader"
        if returns and position[_EPOCH] <= self.changed_in:
            return MODEL_CHANGED
        if returns:  # also the loaders of earlier passes, which the loop will read again
            loaders += [each for each in self if each.trains and each not in loaders]
        for loader in sorted(loaders, key=lambda loader: loader.can_rewind):
            saved = position.get(str(loader.number))
            if not loader.rewind(saved or loader.start):
                return loader.why_not or "it could not be rewound"
            if saved is None:
                loader.next_id = BatchId(loader.first_epoch, 0)
            loader.in_loop = False  # a `break` came after this position
        if returns:
            self._returned, self.returns_to = position, int(position[_EPOCH])
            return ""
        if before is not None and trained.next_id.epoch < before.epoch:
            self.crossed = before.epoch
        ended = (position.get(str(loader.number)) for loader in self if loader not in loaders)
        if str(trained.number) not in position and any(at and at["index"] for at in ended):
            return EPOCH_LOST
        return ""

    def _returns_with(self, position: Mapping[str, Any]) -> bool:
        """Whether a loop over `Healer.epochs` has to return after a rewind to this position.

        To an earlier epoch, to an earlier pass of the same epoch, or to an earlier batch of the
        same pass. In the last case the loop begins the pass again, at this batch: otherwise the
        program would count more batches than the loader has, and many programs divide by, index
        with or compare with this length. A stream without a length just continues.
        """
        epoch = position.get(_EPOCH, self.next_epoch)
        trained = self.last_trained
        if epoch < self.next_epoch:
            return True
        if trained is None:
            return False
        is_earlier_pass = self.names_epochs and str(trained.number) not in position
        return is_earlier_pass or trained.length is not None

    def _of_steps(self) -> list[RunLoader]:
        """The last trained loader, and the other loaders that a loop reads for steps."""
        last = self.last_trained
        others = [each for each in self if each is not last and each.trains and each.in_loop]
        return [] if last is None else [last, *others]
