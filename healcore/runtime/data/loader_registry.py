"""The loaders of a run, whose positions are saved and restored together.

A loop calls `batches` once, or once per epoch, or with one loader after another. Loaders are
numbered in the order of their first use, so that a restarted program finds each loader again.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

from healcore.runtime.data.batch_stream import Inform
from healcore.runtime.data.earlier_loaders import EarlierLoaders
from healcore.runtime.data.epoch_loop import EpochLoop
from healcore.runtime.data.loader_numbers import LoaderNumbers
from healcore.runtime.data.loader_protocols import AnyLoader
from healcore.runtime.data.positions import (
    BEGUN,
    COUNT,
    EPOCH,
    LEFT,
    TRAINED,
    BatchId,
    Positions,
    SavedPosition,
    check_positions,
    has_begun,
)
from healcore.runtime.data.read_retries import ReadRetries
from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.data.rewinding import is_within_epoch, rewind_each, skip_batches
from healcore.runtime.data.run_loader import RunLoader

EPOCH_LOST = RewindObstacle(
    "each epoch has a loader of its own, so the rest of the earlier epoch is lost"
)
"""Reason of a rollback after which only the steps of the current loader are repeated."""

_MAX_LOADERS = 8
"""Number of loaders to keep. A loop may make a new loader for every epoch, without an end."""
_MAX_IN_EPOCHS = 64
"""Number of loaders to keep if they were read in this epoch or the epoch before. A program that
reads many loaders in each epoch reads the same loaders again in the next epoch."""

Limit = Callable[[int], int] | None
"""Takes the number of an epoch and returns its largest number of batches; None for no limit."""


class LoaderRegistry:
    """All loaders of a run.

    A checkpoint has the position of every loader (`position`). A rollback moves the loaders back
    that it finds, and a restart has no loader yet. So there are two ways back:

        rollback   `rewind`: each loader of the steps moves to its position at once
        restart    `resume`: the positions wait in `EarlierLoaders`
                   `begin`: the loop begins a loader, which takes over the position of its number

    A rollback in a loop over `Healer.epochs` uses both ways, see `EpochLoop`.

    Args:
        inform: called with lines about the progress of a long read, or None.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        epoch_loop: the program's own loop over epochs.
        notices: sentences for the log. `RunBatches.begin` logs them and empties the list.
        last_trained: the loader of the last step, or the first loader. Rollbacks rewind it, and the
            other loaders that a loop reads for steps, but not the loader of an evaluation.
    """

    def __init__(self, *, inform: Inform | None = None, retries: ReadRetries | None = None) -> None:
        self.epoch_loop = EpochLoop()
        self.notices: list[str] = []
        self._inform = inform
        self._retries = retries
        self.last_trained: RunLoader | None = None
        self._loaders: list[RunLoader] = []
        """The loaders in the order of their last use."""
        self._skipped: defaultdict[int, set[BatchId]] = defaultdict(set)
        """Number of a loader -> its batches to skip."""
        self._earlier = EarlierLoaders()
        self._numbers = LoaderNumbers(self._earlier, self.epoch_loop)
        self._completed: list[AnyLoader] = []
        """Loaders of a completed run, which are not read again."""
        self._is_short = False
        """Whether a loader ends before its saved position."""
        self._noticed: set[str] = set()
        """The notices so far: each is written once."""

    def __iter__(self) -> Iterator[RunLoader]:
        return iter(self._loaders)

    @property
    def is_empty(self) -> bool:
        """Whether the run has used no loader for training, in this and in earlier processes.

        The loop of such a run has data of its own, which healcore cannot rewind or skip. A run that
        takes its first batch later is empty until then.
        """
        return self.last_trained is None and not self._earlier.count

    @property
    def place(self) -> BatchId:
        """Epoch and index of the batch in use, or between two batches of the next batch.

        In a loop over `Healer.epochs` the epoch is the loop's epoch, also after its last batch.
        """
        loader = self._reading or self.last_trained
        if loader is None:
            default = BatchId(self.epoch_loop.next_epoch, 0)
            place = self._earlier.furthest_place(default)
        elif loader.in_use and loader.last_id is not None:
            place = loader.last_id
        else:
            place = loader.next_id
        if not self.epoch_loop.can_return:
            return place
        epoch = self.epoch_loop.next_epoch
        if self.epoch_loop.returns_to is not None:
            epoch = self.epoch_loop.returns_to
        if place.epoch == epoch:
            return BatchId(epoch, place.index)
        return BatchId(epoch, 0)

    @property
    def place_of_break(self) -> BatchId | None:
        """The next batch of the loader of the last step if a `break` has left it, or None."""
        loader = self.last_trained
        if loader is None or not loader.in_loop or not loader.left_by_break:
            return None
        return loader.next_id

    @property
    def _reading(self) -> RunLoader | None:
        """The loader of this epoch whose batch is in use, or None.

        Possibly no step has used this loader yet: in an epoch with several loaders, `last_trained`
        is then the loader before.
        """
        epoch_loop = self.epoch_loop
        if not epoch_loop.can_return or not epoch_loop.names_epochs or not self._loaders:
            return None
        newest = self._loaders[-1]
        trained = self.last_trained
        if not newest.in_use or (trained is not None and trained.in_use):
            return None
        if newest.last_id is None or newest.last_id.epoch != epoch_loop.next_epoch:
            return None
        return newest

    def find(self, loader: AnyLoader) -> RunLoader | None:
        """Finds the cursor of a loader.

        Args:
            loader: the user's loader, which is compared by identity.

        Returns:
            The cursor, or None before its first use in this process.
        """
        for known in self._loaders:
            if known.loader is loader:
                return known
        return None

    def count_from(self, number: int) -> None:
        """Sets the number of the next new loader.

        For a loop that begins at a later epoch after a restart, and makes no loader of an earlier
        epoch again. A number is never lowered.

        Args:
            number: the least number of the next new loader.
        """
        self._numbers.count_from(number)

    def saved_position(self, loader: AnyLoader, epoch: int | None = None) -> SavedPosition | None:
        """The position that an earlier process has saved for a loader.

        Args:
            loader: the user's loader.
            epoch: the epoch of the program's own loop, or None if the loop does not name it.

        Returns:
            The position, or None for a new loader and for a loader that has taken over its
            position. None too for a loader of this process that trains nothing: a return to an
            earlier epoch moves only the loaders of steps.
        """
        known = self.find(loader)
        if known is None:
            number = self._numbers.of_new(epoch)
        elif known.trains:
            number = known.number
        else:
            return None
        return self._earlier.positions.get(str(number))

    def is_of_completed_run(self, loader: AnyLoader, epoch: int | None = None) -> bool:
        """Whether a completed run has trained with this loader.

        A program that is started again after its end then skips the loop over the loader, but not
        a loop that evaluates. The loader gets its number here, as in `begin`.

        Args:
            loader: the user's loader.
            epoch: the epoch of the program's own loop, or None if the loop does not name it.
        """
        known = self.find(loader)
        if known is not None:
            return known.trains
        if any(loader is each for each in self._completed):
            return True
        number = self._numbers.of_new(epoch)
        has_trained = self._earlier.has_trained(number)
        if has_trained:
            self._completed.append(loader)
            self._numbers.use(number, epoch)
        return has_trained

    def pass_over_completed(self) -> None:
        """Numbers the next new loader after the loaders that a completed run has trained with.

        Call it where the program's loop does not run, and so does not name its loaders. Otherwise a
        loader for an evaluation after the loop would take the position of the first training
        loader.
        """
        self._numbers.pass_over_completed()

    # -- the start of a pass --------------------------------------------------------------------

    def begin(
        self,
        loader: AnyLoader,
        epochs: int | None,
        epoch: int | None = None,
        limit: Limit = None,
    ) -> RunLoader:
        """Begins to iterate over a loader.

        After a restart the loader continues at its saved position. After a `break` it begins the
        next epoch, as any loader does.

            find the cursor, or make a numbered one ── take over the saved position, if there is one
            ── end after the epoch that the loop names ── forget loaders that nobody reads

        Args:
            loader: the user's loader.
            epochs: number of further epochs, or None for no end.
            epoch: the only epoch to read, which is the epoch of the program's own loop; or None.
            limit: see `Limit`.

        Returns:
            The loader's cursor.
        """
        begun = self.find(loader)
        saved = self.saved_position(loader, epoch)
        if begun is None:
            begun = self._new(loader, epochs, epoch, limit)
        else:
            self._loaders.remove(begun)
            begun.begin_loop(epochs)
        self._loaders.append(begun)
        self._numbers.use(begun.number, epoch)
        self.last_trained = self.last_trained or begun
        if saved is not None:
            del self._earlier.positions[str(begun.number)]
            self._continue_at(begun, saved)
            if begun.number in self._earlier.left:
                begun.abandon()
            if self.epoch_loop.returned and begun.trains:
                self.last_trained = begun  # `place` is of the loader that continues
        if epoch is not None:
            self._read_named_epoch(begun, epoch, resumes=saved is not None)
        elif saved is not None and begun.beyond_last_epoch:
            self.notices.append(
                f"the run resumes in epoch {saved['epoch']}, so a pass over an earlier epoch "
                "yields no batch, and no epoch is trained twice. But the program's own code after "
                "such a pass, for example an evaluation, runs again. `for epoch in "
                "healer.epochs(n)` with batches(loader, epoch=epoch) begins at the right epoch; a "
                "loop without epochs needs batches(loader, epochs=None)"
            )
        self._forget_surplus(begun)
        return begun

    def _read_named_epoch(self, begun: RunLoader, epoch: int, *, resumes: bool) -> None:
        """Makes a loader read the only epoch that the program's loop has named.

        Args:
            begun: the cursor of the loader, which the loop begins.
            epoch: number of the epoch, from 0.
            resumes: whether the loader has just taken over a saved position.
        """
        epoch_loop = self.epoch_loop
        if resumes and epoch_loop.can_return and begun.next_id.epoch == epoch - 1:
            # The loop was in this epoch already, so a `break` had left the epoch before. Without a
            # loop over `Healer.epochs`, a rollback may have led into that epoch instead.
            begun.abandon()
        continues = resumes or bool(epoch_loop.returned)
        begun.read_only(epoch, resumes=continues and epoch == epoch_loop.next_epoch)
        epoch_loop.next_epoch = epoch
        epoch_loop.names_epochs = True

    def _forget_surplus(self, begun: RunLoader) -> None:
        """Forgets the oldest loaders beyond the maximum, first loaders that train nothing.

        Never forgets a loader that a loop reads, although it may have trained nothing yet: its
        batches would belong to no loader of the run, and no checkpoint would have its position.
        """
        recent = self._numbers.recent()
        while len(self._loaders) > _MAX_LOADERS:
            others = []
            for each in self._loaders:
                is_read = each is begun or (each.in_loop and not each.left_by_break)
                is_kept = each.number in recent and len(self._loaders) <= _MAX_IN_EPOCHS
                if each is not self.last_trained and not is_read and not is_kept:
                    others.append(each)
            if not others:
                return
            oldest = min(others, key=lambda each: each.trains)  # `min` returns the first one
            self._loaders.remove(oldest)

    def _new(
        self, loader: AnyLoader, epochs: int | None, epoch: int | None, limit: Limit
    ) -> RunLoader:
        """The cursor of a loader at its first use, numbered.

        A program that makes a loader for each epoch makes it again when the loop returns to an
        epoch. The new loader gets the number of the old loader, which the program does not read
        again. So the new loader continues where the old loader was, and skips the same batches.
        """
        number = self._numbers.of_new(epoch)
        self._loaders = [each for each in self._loaders if each.number != number]
        new = RunLoader(
            number,
            loader,
            epochs,
            self._skipped[number],
            limit,
            retries=self._retries,
            inform=self._inform,
            first_epoch=epoch or 0,
        )
        new.exhausted_before = self._earlier.has_ended(number)
        notice = f"after rollbacks the data continues forward: {new.rewind_obstacle}"
        if not new.can_rewind and notice not in self._noticed:
            self._noticed.add(notice)
            self.notices.append(notice)
        return new

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`.

        Args:
            epoch: number of the epoch. After a return it is an earlier one.
        """
        self.epoch_loop.begin(epoch)
        self._numbers.begin_epoch(epoch)

    def return_to_epoch(self) -> int:
        """Ends the passes of the loaders in a loop that returns to an earlier epoch.

        Call it when the body of the current epoch has ended. The loop then continues as after a
        restart from the checkpoint: each loader moves to its position when the loop begins it. At
        this moment the program's own `epoch` is right, which a function that makes a stream may
        use.

        Returns:
            The epoch that the loop yields next.
        """
        epoch = self.epoch_loop.end_return()
        returned = self.epoch_loop.returned
        for loader in self:
            if loader.trains:
                loader.end_before(epoch)
                loader.is_undone = str(loader.number) not in returned
        self._numbers.return_to(returned)
        return epoch

    def _continue_at(self, begun: RunLoader, saved: SavedPosition) -> None:
        """Moves a loader to its position in an earlier process."""
        begun.trains |= has_begun(saved)
        if not begun.trains:
            begun.start = saved
        if not begun.rewind(saved) and begun.trains:
            notice = begun.fast_forward(saved)
            if notice:
                self.notices.append(notice)
        length = begun.length
        if length and begun.next_id.index > length:
            self._is_short = True

    @property
    def has_begun_last(self) -> bool:
        """See `LoaderNumbers.has_begun_last`."""
        return self._numbers.has_begun_last

    @property
    def at_epochs(self) -> bool:
        """Whether the loop has caught up with the loops of earlier processes.

        It has if all saved positions are in use, and no loader stands within an epoch that the
        loop does not reach. Only then do random states of the end of a pass apply.
        """
        if self._earlier.positions or self._is_short:
            return False
        return not any(each.beyond_last_epoch for each in self)

    # -- positions ------------------------------------------------------------------------------

    @property
    def awaits_training_data(self) -> bool:
        """Whether no loader has taken over the position of the loader of the last step yet.

        After a restart the program may evaluate before it comes to its training loop. Until then
        the run can be neither saved nor rolled back: its place in the data belongs to no loader of
        this process.
        """
        return str(self._earlier.trained) in self._earlier.positions

    @property
    def can_rewind(self) -> bool:
        """Whether the loaders of the steps can be rewound.

        A rollback then repeats its steps with the same data. Otherwise it restores the weights, and
        continues with the batches that come next. False without a loader.
        """
        loaders = self._of_steps()
        return bool(loaders) and all(loader.can_rewind for loader in loaders)

    def position(self) -> Positions:
        """The positions of all loaders, for a checkpoint.

        A loader that trains nothing has the position of its start: an evaluation reads it from its
        first batch again.

        Returns:
            Number of a loader as text -> its position. Under `COUNT`, `EPOCH`, `BEGUN` and
            `TRAINED` are the next number of a loader, the epoch of the loop, the loaders begun in
            this epoch, and the loader of the last step.
        """
        positions: Positions = {}
        count, trained = self._numbers.next, None
        if self.last_trained is not None and self.last_trained.trains:
            trained = self.last_trained.number
        if self.awaits_training_data:
            positions.update(self._earlier.positions)
            count, trained = max(count, self._earlier.count), self._earlier.trained
        for loader in self:
            if loader.exhausted_before or loader.is_undone:
                continue
            if loader.trains:
                positions[str(loader.number)] = loader.position()
            else:
                positions[str(loader.number)] = loader.start
        epoch = self.epoch_loop.next_epoch
        positions[COUNT] = count
        positions[EPOCH] = epoch
        begun = self._numbers.begun_in(epoch)
        left = [each.number for each in self if each.trains and each.in_loop and each.left_by_break]
        if self.awaits_training_data:
            begun = self._earlier.begun.get(epoch, begun)
            left = self._earlier.left
        if left and self.epoch_loop.can_return and self.epoch_loop.names_epochs:
            positions[LEFT] = left
        if begun is not None:
            positions[BEGUN] = begun
        if trained is not None:
            positions[TRAINED] = trained
        return positions

    def position_after_step(self) -> Positions | None:
        """The positions after the last step.

        Batches that were read since that step belong to the next step, and a restart has to read
        them again. For a save at an exception in the middle of a step.

        Returns:
            As `position`, or None if a loader cannot be rewound to the step.
        """
        pending = [each for each in self if each.trains and each.first_pending is not None]
        before: Positions = {}
        for loader in pending:
            assert loader.first_pending is not None
            before[str(loader.number)] = loader.position_before(loader.first_pending)
        if None in before.values():
            return None
        return {**self.position(), **before}

    def forward_positions(self) -> Positions:
        """The positions of loaders that cannot be rewound, JSON-safe.

        A rollback moves all other loaders back, and saves these positions. A restart after the
        rollback then continues where such a loader really is.
        """
        forward = [each for each in self if each.trains and not each.can_rewind]
        return {str(loader.number): loader.position() for loader in forward}

    def skipped_by_loader(self) -> dict[str, list[list[int]]]:
        """Ids of all skipped batches, for a checkpoint.

        Without them a restart would read the batches again that a rollback has skipped.

        Returns:
            Number of a loader as text -> pairs of epoch and index, sorted.
        """
        skipped: dict[str, list[list[int]]] = {}
        for number, ids in self._skipped.items():
            skipped[str(number)] = [list(batch) for batch in sorted(ids)]
        return skipped

    def skipped_ids(self) -> frozenset[BatchId]:
        """Ids of all skipped batches, of any loader."""
        return frozenset().union(*self._skipped.values())

    def check(self, position: Mapping[str, Any]) -> None:
        """Checks positions of an earlier process before `resume`.

        A checkpoint with positions that cannot be read is then not restored at all, and an older
        checkpoint can be tried.

        Args:
            position: what `position` has returned.

        Raises:
            DataError: a part of them cannot be read. Nothing was changed.
        """
        check_positions(position)

    def resume(
        self, position: Mapping[str, Any], skipped: Mapping[str, Iterable[Iterable[int]]] = {}
    ) -> None:
        """Stores positions and skipped batches of an earlier process for later calls of `begin`.

        Args:
            position: result of `position`.
            skipped: result of `skipped_by_loader`.
        """
        self.epoch_loop.next_epoch = self._earlier.load(position)
        for number, ids in skipped.items():
            self._skipped[int(number)] = {BatchId(*pair) for pair in ids}

    # -- rollbacks ------------------------------------------------------------------------------

    def rewind(
        self,
        position: dict[str, Any] | None,
        to_skip: Collection[BatchId],
        skip_more: int,
        read_again: Sequence[BatchId] = (),
    ) -> RewindObstacle | None:
        """Rewinds the loaders of the steps and skips some batches.

            mark the batches to skip
                   │
            does the loop have to return to an earlier epoch, and may it? ── no ──► MODEL_CHANGED
                   │
            rewind each loader ── one of them cannot ──► its obstacle
                   │
            begin the return, or note the epoch that the loop crosses

        If one of the loaders cannot be rewound, all of them continue forward, past the bad batches.
        The ids apply to the last trained loader, and to loaders at the same batch, as in a `zip`.

        Args:
            position: positions of the checkpoint, or None if the checkpoint has no positions.
            to_skip: batches to skip.
            skip_more: number of batches to skip after them.
            read_again: batches that an earlier rollback has skipped, and that are read again now.

        Returns:
            Why the loaders were not rewound, or None.
        """
        loaders = self._of_steps()
        if not loaders:
            return RewindObstacle("the loop does not read its batches through healcore")
        trained, epoch_loop = loaders[0], self.epoch_loop
        before = trained.last_id
        epoch_loop.crossed = None
        for loader in loaders:
            if loader.next_id == trained.next_id:
                skip_batches(loader, to_skip, skip_more, read_again)
        if position is None:
            return RewindObstacle("the checkpoint has no position of this loader")
        returns = epoch_loop.returns_with(position, trained)
        if returns:
            obstacle = epoch_loop.return_obstacle(position)
            if obstacle is not None:
                return obstacle
            # Also the loaders of earlier passes, which the loop will read again.
            loaders += [each for each in self if each.trains and each not in loaders]
        obstacle = rewind_each(loaders, position)
        if obstacle is not None:
            return obstacle
        if returns:
            epoch_loop.begin_return(position)
            return None
        if before is not None and trained.next_id.epoch < before.epoch:
            epoch_loop.crossed = before.epoch
        others = [each for each in self if each not in loaders]
        if str(trained.number) not in position and is_within_epoch(position, others):
            return EPOCH_LOST
        return None

    def _of_steps(self) -> list[RunLoader]:
        """The last trained loader, and the other loaders that a loop reads for steps."""
        last = self.last_trained
        if last is None:
            return []
        others = [each for each in self if each is not last and each.trains and each.in_loop]
        return [last, *others]
