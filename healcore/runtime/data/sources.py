"""The data of a run: named sources, whose positions are saved and restored together.

    source    a named stream of batches, read in passes by one loader or by one after another
    place     where in the program a pass begins, see `Place`. A restart finds a pass by its place,
              whatever loader object the program reads it with.
    number    the passes that take steps are counted: `BatchId.epoch`.

A pass that no step has used was an evaluation. It has no number of its own, and a restart reads it
again from its first batch:

    places      0         1            2         3
    saved       training  evaluation   training, at batch 7
    restart     complete  read again   continues at batch 7
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from healcore.console import counted
from healcore.runtime.data.cursor import Cursor, Limit
from healcore.runtime.data.loaders import batch_size, reads_the_same
from healcore.runtime.data.positions import (
    BatchId,
    DataError,
    Place,
    Positions,
    SavedPosition,
    place_of,
)
from healcore.runtime.data.readers import ScanBlocks

if TYPE_CHECKING:
    from healcore.runtime.faults.retry import Retries

OTHER_LOADER = "each epoch has a loader of its own"
"""Reason of a rollback to a place in a loader that is read no more: only the steps of the newest
loader are repeated."""
MODEL_CHANGED = (
    "the program would change the structure of its model again at the beginning of that epoch"
)
"""Reason of a rollback after which a loop over `Healer.epochs` does not return."""
_MAX_CURSORS = 8
"""Number of loaders of a source whose cursors are kept. A loop may make a new loader for every
epoch, without an end."""


class SourceCursor(Cursor):
    """The cursor of one loader of a source, and what the program's loop does with its batches.

        event                                        `in_loop` is then
        -------------------------------------------  -----------------
        a loop begins, or `next` reads a batch       True
        the loop has no further batch                False
        `break`                                      True: the next loop drops the rest of the epoch
        a rollback                                   False: the next loop begins where the loader is

    Attributes:
        source: the source that the loader belongs to.
        place: where in the program the newest pass has begun.
        first: number of the first pass of the newest loop.
        since: number of the pass since which the source was read with this loader alone, or with
            others of which it can repeat the epochs.
        start: the position before the first pass of this process.
        in_loop: whether a loop reads the loader. A `break` drops the rest of the epoch.
        in_use: whether the body of the loop runs with the last batch. A save now would lose what
            the body does after it.
        left_by_break: whether a `break` has followed the last batch. What the program does then may
            still belong to the batch.
        trains: whether a step has used its batches.
        was_moved: whether the newest pass continues at a saved position, whose random states are
            from after what the loader has drawn.
        substitute: the batch that replaces an unreadable batch, with several ranks.
    """

    def __init__(self, source: Source, loader: Any, retries: Retries | None) -> None:
        super().__init__(loader, retries=retries)
        self.source = source
        self.skipped_batch_ids = source.skipped
        self.place: Place = []
        self.first = self.since = 0
        self.start: SavedPosition = {}
        self.in_loop = self.in_use = self.left_by_break = False
        self.trains = self.was_moved = False
        self.substitute: Any = None

    @property
    def is_scan(self) -> bool:
        """Whether the batches are blocks of `Healer.scan`, which a rollback never skips."""
        return isinstance(self.loader, ScanBlocks)

    @property
    def next_pass(self) -> int:
        """Number of the pass that the next loop begins, or continues after a rollback."""
        epoch, index = self.next_id
        return epoch + (self.is_used_up or (index > 0 and self.in_loop))

    def leave_by_break(self) -> None:
        """Notes that a `break` has ended the loop body."""
        self.in_use, self.left_by_break = False, True


class Source:
    """A named stream of batches with a position: what `healer.batches(loader, name=)` reads.

    Attributes:
        name: the name that the program has given, or an empty string.
        skipped: ids of the batches to skip.
        current: the cursor of the newest loop, or None.
        trained: the cursor of the newest step, or None.
        awaited: the position that no loop has begun again yet, or None.
        passes: number of passes that have begun in this epoch of the program, see `Place`.
        evaluations: places of the evaluations that a restart reads again, or has still to read.
        is_short: whether the loader ends before the position that it has continued at.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.skipped: set[BatchId] = set()
        self.current: SourceCursor | None = None
        self.trained: SourceCursor | None = None
        self.awaited: SavedPosition | None = None
        self.passes = 0
        self.evaluations: list[Place] = []
        self.is_short = False
        self._least_pass = 0
        """Number of the next pass while no loader of this process has trained."""
        self._cursors: list[SourceCursor] = []

    @property
    def next_pass(self) -> int:
        """Number of the next pass that takes steps."""
        if self.awaited is not None:
            place = place_of(self.awaited)
            return place.epoch + (self.awaited["left"] and place.index > 0)
        if self.trained is None:
            return self._least_pass
        return self.trained.next_pass

    def find(self, loader: Any) -> SourceCursor | None:
        """The cursor of a loader, which is compared by identity, or None for a new loader."""
        return next((each for each in self._cursors if each.loader is loader), None)

    def keep(self, cursor: SourceCursor) -> None:
        """Keeps the cursor of a pass that begins, and forgets the one that was unused longest."""
        others = [each for each in self._cursors if each is not cursor]
        self._cursors = [*others[1 - _MAX_CURSORS :], cursor]

    def position_for(self, place: Place) -> SavedPosition | None:
        """The awaited position, unless the pass at a place needs it no more.

        After the place of the position only the pass at the same place in a later epoch of the
        program's loop needs it: perhaps it reads the same loader, which has a state.
        """
        saved = self.awaited
        if saved is None or place <= saved["place"]:
            return saved
        loop, epoch, index = saved["place"]
        if epoch == 0 or place != [loop, place[1], index]:
            self._least_pass, self.awaited, saved = self.next_pass, None, None
        return saved

    def position(self, *, leaves: bool, before: BatchId | None) -> SavedPosition | None:
        """The position after the batch that was read last, or None if no step has used a batch.

        Args:
            leaves: whether a `break` drops the rest of its pass, also after a restart.
            before: the batch before which the position is, or None for the newest position.

        Raises:
            DataError: the position before the batch cannot be reached.
        """
        cursor, now = self.trained, self.current
        if self.awaited is not None or cursor is None:
            return self.awaited
        if before is None:
            position = cursor.position()
        else:
            position = cursor.position_before(before)
        if position is None:
            raise DataError("the loader cannot be rewound to the first batch of the step")
        evaluations = [*self.evaluations]
        begun = now is not None and now is not cursor
        if now is not None and begun and (now.left_by_break or not now.in_loop):
            evaluations.append(now.place)
        left = leaves and before is None and cursor.in_loop and cursor.left_by_break
        return {
            **position,
            "place": cursor.place,
            "first": cursor.first,
            "since": cursor.since,
            "batch_size": batch_size(cursor.loader),
            "evaluations": evaluations,
            "begun": begun,
            "left": left,
        }

    def await_at(self, saved: SavedPosition | None) -> None:
        """Waits until the program begins the pass of a position again, after a restart or a return.

        Args:
            saved: the position, or None if the source has trained nothing by then.
        """
        self.awaited, self.trained, self.current = saved, None, None
        self.passes = self._least_pass = 0
        if saved is None:
            self.evaluations = []
        else:
            self.evaluations = [*saved["evaluations"]]
        for cursor in self._cursors:
            cursor.in_loop = False
            if cursor.trains:  # also one that the program has begun to read after the position
                cursor.seek(cursor.start)


class EpochLoop:
    """The program's own loop over epochs, and its return to an earlier epoch.

    Three kinds of programs train for epochs:

        for batch in healer.batches(loader, epochs=3)       healcore counts the epochs
        for epoch in range(3): ... batches(loader)          the program counts, healcore cannot
                                                            change its number
        for epoch in healer.epochs(3): ... batches(loader)  healcore yields the numbers, and can
                                                            return to an earlier one (`can_return`)

    A rollback cannot jump out of the loop body of the program. So a return has two ends:

        body of epoch 3
          │  a rollback to a checkpoint of epoch 1: `returns_to` is set
          │  the passes over loaders end, and the rest of the body runs (an evaluation, say)
        end of the body: `Healer.epochs` yields 1
          │
        body of epoch 1
             each loader that the loop begins takes over its position, as after a restart from the
             checkpoint

    Attributes:
        next_epoch: epoch at which the program's own loop continues after a restart. While the code
            after the batches of an epoch runs, this is still the same epoch, with no batch left.
        names_epochs: whether the program's loop passes the number of its epoch.
        can_return: whether a loop over `Healer.epochs` runs, which can return to an earlier epoch.
        returns_to: epoch to which this loop returns because of a rollback, or None. Until then the
            passes of loaders have no further batch.
        total_epochs: number of the epoch at which a loop over `Healer.epochs` ends.
        changed_in: epoch in which the program has last changed the structure of its model, or None
            without a change. A loop over `Healer.epochs` returns to later epochs only.
    """

    def __init__(self) -> None:
        self.next_epoch = self.total_epochs = 0
        self.names_epochs = self.can_return = False
        self.returns_to: int | None = None
        self.changed_in: int | None = None

    @property
    def has_more_epochs(self) -> bool:
        """Whether another epoch follows the current epoch of a loop over `Healer.epochs`.

        The end of a loader is the end of a pass then, and not of the run. False if the number of
        epochs is unknown, as in the program's own `for epoch in range(n)`: any end of a loader may
        be the end of the run.
        """
        return self.can_return and self.next_epoch + 1 < self.total_epochs


class Sources:
    """The sources of a run.

    A checkpoint has the position of every source that trains (`position`). There is one way back,
    at a start and at a rollback: `seek`. Loops read through `begin` and the cursor that it returns.

    Args:
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        epoch_loop: the program's own loop over epochs.
        passes: number of passes that this process has begun.
        last_trained: the cursor of the last step, or the first cursor. Rollbacks rewind it, and the
            others that a loop reads for steps, but not the loader of an evaluation.
        pending: the batches that were read since the last step, with their cursors.
        notices: sentences for the log.
    """

    def __init__(self, retries: Retries | None = None) -> None:
        self.epoch_loop = EpochLoop()
        self.notices: list[str] = []
        self.passes = 0
        self.last_trained: SourceCursor | None = None
        self.pending: list[tuple[SourceCursor, BatchId]] = []
        self._sources: dict[str, Source] = {}
        self._trained: str | None = None
        """Name of the source of the last step before this process, or None."""
        self._loop = 0
        """Number of loops over numbered epochs that have ended, see `Place`."""
        self._epoch = 0
        """The epoch of such a loop plus 1, or 0 outside of one, see `Place`."""
        self._forward: set[str] = set()
        """Obstacles of loaders that cannot be rewound: each has one notice."""
        self._retries = retries

    def __iter__(self) -> Iterator[SourceCursor]:
        """The cursors of the newest steps and of the newest loops."""
        cursors = [each for s in self._sources.values() for each in (s.trained, s.current)]
        found = {id(each): each for each in (*cursors, self.last_trained) if each is not None}
        return iter(found.values())

    @property
    def is_empty(self) -> bool:
        """Whether the run has used no loader for training, in this and in earlier processes.

        The loop of such a run has data of its own, which healcore cannot rewind or skip. A run that
        takes its first batch later is empty until then.
        """
        return self.last_trained is None and self._trained is None

    def find(self, loader: Any) -> SourceCursor | None:
        """The cursor of a loader, or None before its first use in this process."""
        cursors = (source.find(loader) for source in self._sources.values())
        return next((cursor for cursor in cursors if cursor is not None), None)

    @property
    def place(self) -> BatchId:
        """Epoch and index of the batch in use, or between two batches of the next batch.

        In a loop over `Healer.epochs` the epoch is the loop's epoch, also after its last batch.
        """
        epoch_loop, cursor = self.epoch_loop, self.last_trained
        if epoch_loop.can_return and (cursor is None or not cursor.in_use):
            cursor = next((each for each in self if each.in_use), cursor)
        if cursor is None:
            name = self._trained
        else:
            name = cursor.source.name
        if name is None:
            awaited = None
        else:
            awaited = self._sources[name].awaited
        if awaited is not None:
            at, place = place_of(awaited), awaited["place"]
        elif cursor is None:
            return BatchId(epoch_loop.next_epoch, 0)
        else:
            at, place = cursor.next_id, cursor.place
            if cursor.in_use and cursor.in_loop:  # no rollback has followed the batch
                at = BatchId(at.epoch, max(at.index - 1, 0))
        if not epoch_loop.can_return:
            return at
        epoch = epoch_loop.next_epoch
        if epoch_loop.returns_to is not None:
            epoch = epoch_loop.returns_to
        return BatchId(epoch, at.index if place[1] == 1 + epoch else 0)

    @property
    def place_of_break(self) -> BatchId | None:
        """The next batch of the loader of the last step if a `break` has left it, or None."""
        loader = self.last_trained
        if loader is None or not (loader.in_loop and loader.left_by_break):
            return None
        return loader.next_id

    # -- passes ---------------------------------------------------------------------------------

    def begin(
        self,
        loader: Any,
        epochs: int | None,
        epoch: int | None = None,
        limit: Limit = None,
        *,
        name: str = "",
        by_trainer: bool = False,
        completed: bool = False,
    ) -> SourceCursor | None:
        """Begins a loop over a loader. After a restart it continues at the saved position.

        Args:
            loader: the user's loader.
            epochs: number of passes, or None for no end.
            epoch: the epoch of the program's own loop, or None if the loop does not name it.
            limit: see `Limit`.
            name: name of the source.
            by_trainer: whether a trainer reads, which continues at the saved position at once.
            completed: whether an earlier process has completed the run.

        Returns:
            The cursor of the loader, or None if an earlier process has read the pass to its end.

        Raises:
            DataError: another loop reads the source.
        """
        source = self._source(name)
        if epoch is not None:
            self._begin_named_epoch(epoch)
        place: Place = [self._loop, self._epoch, source.passes]
        cursor = source.find(loader)
        if source.current is cursor:
            other = None
        else:
            other = source.current
        if by_trainer and other is not None:
            other.leave_by_break()  # a trainer reads one loader at a time
        if by_trainer and source.awaited is not None:
            place = source.awaited["place"]
            source.awaited = {**source.awaited, "first": source.next_pass}
        source.passes = place[2] + 1
        self.passes += 1
        evaluates = self.epoch_loop.returns_to is not None or place in source.evaluations
        if evaluates:
            saved = None
        else:
            saved = source.position_for(place)
        if saved is not None and (place < saved["place"] or completed):
            return None
        if other is not None and other.in_loop and not other.left_by_break:
            raise DataError(
                f"a loop over {other.name} has not ended, or its iterator is still in a variable, "
                'and another loop begins: write healer.batches(loader, name="b") for one of the '
                "two loaders. Each name has its own position in the data"
            )
        self._end_pass(source)
        if cursor is None:
            cursor = SourceCursor(source, loader, self._retries)
        source.keep(cursor)
        first = since = source.next_pass
        if saved is not None and place == saved["place"]:
            first, since = saved["first"], saved["since"]
        elif source.awaited is None and source.trained is None and epoch is not None:
            first = since = max(first, epoch)
        if cursor is not source.trained:
            cursor.since = since
            if source.trained is not None and reads_the_same(loader, source.trained.loader):
                cursor.since = source.trained.since
        cursor.limit = limit
        if cursor.next_id.epoch != first and not (isinstance(loader, Iterator) and cursor.trains):
            cursor.abandon()  # a `break` has left the rest of the pass
            cursor.next_id = BatchId(first, 0)
        cursor.read_epochs(first, epochs)
        cursor.first, cursor.in_loop, cursor.was_moved = first, True, False
        cursor.place, source.current = place, cursor
        cursor.start = cursor.start or cursor.position()
        if evaluates:
            cursor.skipped_batch_ids = set()
        if saved is not None:
            self._take_over(source, cursor, saved)
        if self.last_trained is None or cursor.was_moved:
            self.last_trained = cursor  # `place` is of the loader that continues
        why = cursor.obstacle
        if why and why not in self._forward:
            self._forward.add(why)
            self.notices.append(f"after rollbacks the data continues forward: {why}")
        return cursor

    def _take_over(self, source: Source, cursor: SourceCursor, saved: SavedPosition) -> None:
        """Moves the loader that begins the awaited pass to its position.

        A function that makes the batches may ask for the epoch meanwhile, which is the awaited one.
        """
        place = place_of(saved)
        before, size = saved["batch_size"], batch_size(cursor.loader)
        if before != size and None not in (before, size):
            self.notices.append(
                f"batch size: {before} -> {size} (saved -> given): the loader continues at the "
                "same number of batches, which is another position in the data; to start from the "
                "first batch, pass an empty directory"
            )
        was_at, obstacle = cursor.next_id, cursor.seek(saved, reads_forward=True)
        if obstacle and place > was_at and place.index > 0:
            self.notices.append(
                f"read {counted(place.index, 'batch', 'batches')} and dropped them, up to {place}; "
                f"the batches may differ from before: {obstacle}"
            )
        if saved["left"]:
            cursor.abandon()
        source.awaited, length = None, cursor.length
        source.is_short = length is not None and place.index > length > 0
        cursor.was_moved = not cursor.obstacle or cursor.next_id.index > 0 or saved["begun"]
        if place > (0, 0):
            self._note_training(cursor)

    def _source(self, name: str) -> Source:
        """The source of a name, which is made at its first use."""
        if name not in self._sources:
            self._sources[name] = Source(name)
        return self._sources[name]

    def _begin_named_epoch(self, epoch: int) -> None:
        """Begins the epoch that the program has named for a loader, unless it has begun."""
        self.epoch_loop.names_epochs = True
        self.epoch_loop.next_epoch = epoch
        if not self.epoch_loop.can_return and self._epoch != 1 + epoch:
            self._begin(self._loop + (1 + epoch < self._epoch), 1 + epoch, None)

    def begin_epoch(self, epoch: int) -> None:
        """Begins an epoch of a loop over `Healer.epochs`. After a return it is an earlier one."""
        self.epoch_loop.next_epoch = epoch
        self.epoch_loop.can_return = True
        self._begin(self._loop, 1 + epoch, self._loop)

    def end_epochs(self) -> None:
        """Ends a loop over `Healer.epochs`, also one that has had no epoch in this process."""
        self.epoch_loop.can_return = False
        self._begin(self._loop + 1, 0, self._loop)

    def _begin(self, loop: int, epoch: int, returning: int | None) -> None:
        """Begins an epoch of the program's loop, or the code after the loop; see `Place`.

        Args:
            loop: number of the loop.
            epoch: its epoch plus 1, or 0 after the loop.
            returning: number of the loop over `Healer.epochs` that runs or has ended, or None. A
                restart does not run its other epochs again.
        """
        self._loop, self._epoch = loop, epoch
        for source in self._sources.values():
            self._end_pass(source)
            source.current, source.passes = None, 0
            source.evaluations = [
                each for each in source.evaluations if each[0] != returning or each[1] in (0, epoch)
            ]

    def _end_pass(self, source: Source) -> None:
        """Notes that no step belongs to the newest pass any more, as the program goes on."""
        now = source.current
        if now is not None and now is not source.trained and now.place not in source.evaluations:
            source.evaluations.append(now.place)
            now.skipped_batch_ids = set()  # an evaluation has no numbers of its own to be skipped
            self.forget_pending(now)

    def pass_over_completed(self) -> None:
        """Passes over the passes of a completed run, whose loop over steps does not run."""
        for source in self._sources.values():
            if source.awaited is not None:
                source.passes = source.awaited["place"][2] + 1

    # -- steps ----------------------------------------------------------------------------------

    def forget_pending(self, loader: SourceCursor) -> None:
        """Forgets the batches that an evaluation has read, which belong to no step."""
        self.pending = [each for each in self.pending if each[0] is not loader]

    def first_pending(self, loader: SourceCursor) -> BatchId | None:
        """The first batch that was read since the last step, also if reading it has raised."""
        return next((each for reader, each in self.pending if reader is loader), loader.unreadable)

    def train(self, loader: SourceCursor) -> None:
        """Notes that a step has used the pending batches, those of a cursor last."""
        self.last_trained = loader
        for each, _ in self.pending:
            # A loader that a `break` has left was an evaluation, unless it was read last.
            if each is loader or not each.left_by_break:
                self._note_training(each)

    def _note_training(self, cursor: SourceCursor) -> None:
        """Notes that a step has used batches of a cursor, so that its pass has its number."""
        cursor.source.trained = cursor
        cursor.trains = True
        cursor.skipped_batch_ids = cursor.source.skipped

    # -- positions ------------------------------------------------------------------------------

    @property
    def awaits_training_data(self) -> bool:
        """Whether no loader has taken over the position of the loader of the last step yet.

        After a restart the program may evaluate before it comes to its training loop. Until then
        the run can be neither saved nor rolled back: its place in the data belongs to no loader of
        this process.
        """
        return self._trained is not None and self._sources[self._trained].awaited is not None

    @property
    def is_caught_up(self) -> bool:
        """Whether the program has begun all passes again that earlier processes have begun."""
        for source in self._sources.values():
            next_place = [self._loop, self._epoch, source.passes]
            owes = source.evaluations[-1:] >= [next_place]  # they are in the order of their places
            if source.awaited is not None or owes or source.is_short:
                return False
        return True

    @property
    def can_rewind(self) -> bool:
        """Whether the loaders of the steps can be rewound.

        A rollback then repeats its steps with the same data. Otherwise it restores the weights, and
        continues with the batches that come next. False without a loader.
        """
        loaders = self._of_steps()
        return bool(loaders) and not any(loader.obstacle for loader in loaders)

    def position(self, *, after_step: bool = False) -> Positions:
        """The positions of all sources that train, for a checkpoint: see `Positions`.

        Args:
            after_step: whether the positions are those after the last step, for a save at an
                exception in the middle of a step. A restart reads the batches since then again.

        Raises:
            DataError: a loader cannot be rewound to the step.
        """
        sources: dict[str, SavedPosition] = {}
        for name, source in self._sources.items():
            trained, before = source.trained, None
            if after_step and trained is not None:
                before = self.first_pending(trained)
            saved = source.position(leaves=self.epoch_loop.can_return, before=before)
            if saved is not None:
                sources[name] = saved
        name, last = self._trained, self.last_trained
        if last is not None and last.trains:
            name = last.source.name
        return {"epoch": self.epoch_loop.next_epoch, "trained": name, "sources": sources}

    def skipped_by_source(self) -> dict[str, list[BatchId]]:
        """Ids of all skipped batches, for a checkpoint: a restart would read them again.

        Returns:
            Name of a source -> ids, sorted.
        """
        return {name: sorted(source.skipped) for name, source in self._sources.items()}

    def skipped_ids(self) -> frozenset[BatchId]:
        """Ids of all skipped batches, of any source."""
        return frozenset().union(*(source.skipped for source in self._sources.values()))

    def resume_skipped(self, skipped: Mapping[str, Iterable[BatchId]]) -> None:
        """Takes the skipped batches of an earlier process: result of `skipped_by_source`."""
        for name, ids in skipped.items():
            self._source(name).skipped.update(ids)

    # -- the way back ---------------------------------------------------------------------------

    def skip(
        self, to_skip: Collection[BatchId], skip_more: int, read_again: Collection[BatchId]
    ) -> None:
        """Marks the bad batches of a rollback to be skipped.

        The ids apply to the last trained source, and to sources at the same batch, as in a `zip`.
        Bad batches of earlier rollbacks stay marked, because a deeper rollback reads them again.

        Args:
            to_skip: batches to skip.
            skip_more: number of batches after them to skip too, within the epoch.
            read_again: batches that an earlier rollback has skipped, and that are read again now.
        """
        for loader in self._of_steps():
            if self.last_trained is None or loader.next_id != self.last_trained.next_id:
                continue
            skipped = loader.source.skipped
            skipped.update(to_skip)
            if to_skip:
                epoch, index = max(to_skip)
                end = index + 1 + skip_more
                if loader.length is not None:
                    end = min(end, loader.length)
                skipped.update(BatchId(epoch, each) for each in range(index + 1, end))
            skipped.difference_update(read_again)

    def seek(self, position: Mapping[str, Any] | None) -> str:
        """Moves the sources to the positions of a checkpoint, at a start and at a rollback.

            does the program read a loader? ── no ──► wait until it begins the saved passes
                   │
            can all of the loaders be moved? ── no ──► all of them continue forward
                   │
            does it loop over `Healer.epochs`? ── yes ──► the loop returns to the epoch of the
                   │                                      position, and begins the saved passes
            move the loader of each source

        Args:
            position: result of `position` in this or in an earlier process, or None if the
                checkpoint has no positions.

        Returns:
            Why the steps since the position are not all repeated, or an empty string.
        """
        loaders, epoch_loop = self._of_steps(), self.epoch_loop
        if position is None:
            return "the checkpoint has no position of this loader"
        if not loaders:
            epoch_loop.next_epoch = position["epoch"]
            self._await_at(position)
            return "the loop does not read its batches through healcore"
        needed = [*loaders]
        if epoch_loop.can_return:  # it reads the loaders of earlier passes again
            needed += [each.trained for each in self._sources.values() if each.trained is not None]
        for each in needed:
            if each.obstacle:
                return each.obstacle
        if epoch_loop.can_return:
            if epoch_loop.changed_in is not None and position["epoch"] <= epoch_loop.changed_in:
                return MODEL_CHANGED
            self._await_at(position)
            epoch_loop.returns_to = position["epoch"]
            return ""
        is_older = False
        for cursor in loaders:
            saved = position["sources"].get(cursor.source.name)
            if saved is None:
                place = BatchId(0, 0)
            else:
                place = place_of(saved)
            if saved is None or place <= (cursor.since, 0):  # perhaps a state of another loader
                saved = {**cursor.start, "epoch": cursor.since}
            is_older |= place.epoch < cursor.since
            obstacle = cursor.seek(saved)
            if obstacle:
                return obstacle
            cursor.in_loop = False  # a `break` came after this position, so it is undone too
        if is_older:
            return OTHER_LOADER
        return ""

    def _await_at(self, position: Mapping[str, Any]) -> None:
        """Makes all sources wait until the program begins the saved passes again."""
        self._trained, saved = position["trained"], position["sources"]
        for name in {*self._sources, *saved}:
            self._source(name).await_at(saved.get(name))

    def _of_steps(self) -> list[SourceCursor]:
        """The last trained loader, and the other loaders that a loop reads for steps."""
        last = self.last_trained
        if last is None:
            return []
        return [last, *(each for each in self if each is not last and each.trains and each.in_loop)]
