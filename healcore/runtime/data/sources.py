"""`Sources`: the named streams of a run, whose positions are saved and restored together."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from healcore.runtime.data.cursor import Limit
from healcore.runtime.data.positions import (
    BatchId,
    Place,
    Positions,
    SavedPosition,
    place_of,
)
from healcore.runtime.data.readers import RewindObstacle
from healcore.runtime.data.source import Source, SourceCursor

if TYPE_CHECKING:
    from healcore.runtime.faults.retry import Retries

MODEL_CHANGED = RewindObstacle(
    "the program would change the structure of its model again at the beginning of that epoch"
)
"""Reason of a rollback after which a loop over `Healer.epochs` does not return."""


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
        end of the body: `end_return`, and `Healer.epochs` yields 1
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

    def end_return(self) -> int:
        """Ends a return after the body of an epoch. Returns the epoch that the loop yields next."""
        assert self.returns_to is not None
        epoch, self.returns_to = self.returns_to, None
        return epoch


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
        notices: sentences for the log.
    """

    def __init__(self, retries: Retries | None = None) -> None:
        self.epoch_loop = EpochLoop()
        self.notices: list[str] = []
        self.passes = 0
        self.last_trained: SourceCursor | None = None
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
        found: dict[int, SourceCursor] = {}
        for source in self._sources.values():
            for cursor in (source.trained, source.current, self.last_trained):
                if cursor is not None:
                    found[id(cursor)] = cursor
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
    def next_id(self) -> BatchId:
        """The next batch of the source without a name, which a trainer reads."""
        source = self._source("")
        cursor = source.current or source.trained
        if source.awaited is not None:
            return place_of(source.awaited)
        return BatchId(0, 0) if cursor is None else cursor.next_id

    @property
    def place(self) -> BatchId:
        """Epoch and index of the batch in use, or between two batches of the next batch.

        In a loop over `Healer.epochs` the epoch is the loop's epoch, also after its last batch.
        """
        epoch_loop, cursor = self.epoch_loop, self.last_trained
        if epoch_loop.can_return and (cursor is None or not cursor.in_use):
            cursor = next((each for each in self if each.in_use), cursor)
        name = self._trained if cursor is None else cursor.source.name
        awaited = None if name is None else self._sources[name].awaited
        if awaited is not None:
            at, place = place_of(awaited), awaited["place"]
        elif cursor is None:
            return BatchId(epoch_loop.next_epoch, 0)
        else:
            at, place = cursor.next_id, cursor.place
            if cursor.in_use and cursor.last_id is not None:
                at = cursor.last_id
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
        if loader is None or not loader.in_loop or not loader.left_by_break:
            return None
        return loader.next_id

    # -- the start of a pass --------------------------------------------------------------------

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
            The cursor of the loader, or None if an earlier process has completed the pass.

        Raises:
            DataError: see `Source.begin`.
        """
        source = self._source(name)
        if epoch is not None:
            self._begin_named_epoch(epoch)
        place: Place = [self._loop, self._epoch, source.passes]
        if by_trainer and source.current is not None and source.current.loader is not loader:
            source.current.leave_by_break()  # a trainer reads one loader at a time
        if by_trainer and source.awaited is not None:
            place = source.awaited["place"]
            source.awaited = {**source.awaited, "first": source.next_pass}
        source.passes = place[2] + 1
        self.passes += 1
        begun = source.begin(
            loader,
            place,
            epochs,
            limit,
            epoch=epoch,
            evaluates=self.epoch_loop.returns_to is not None,
            completed=completed,
        )
        if begun is None:
            return None
        if self.last_trained is None or begun.has_begun_before:
            self.last_trained = begun  # `place` is of the loader that continues
        if not begun.can_rewind and str(begun.rewind_obstacle) not in self._forward:
            self._forward.add(str(begun.rewind_obstacle))
            self.notices.append(
                f"after rollbacks the data continues forward: {begun.rewind_obstacle}"
            )
        return begun

    def _source(self, name: str) -> Source:
        """The source of a name, which is made at its first use."""
        if name not in self._sources:
            self._sources[name] = Source(name, self.notices, self._retries)
        return self._sources[name]

    def _begin_named_epoch(self, epoch: int) -> None:
        """Begins the epoch that the program has named for a loader, unless it has begun."""
        self.epoch_loop.names_epochs = True
        self.epoch_loop.next_epoch = epoch
        if self.epoch_loop.can_return or self._epoch == 1 + epoch:
            return
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
        """Begins an epoch of the program's loop, or the code after the loop; see `Place`."""
        self._loop, self._epoch = loop, epoch
        for source in self._sources.values():
            source.begin_epoch(returning)

    def pass_over_completed(self) -> None:
        """Passes over the passes of a completed run, whose loop over steps does not run."""
        for source in self._sources.values():
            if source.awaited is not None:
                source.passes = source.awaited["place"][2] + 1

    def train(self, loader: SourceCursor) -> None:
        """Notes that a step has used the pending batches, those of a cursor last."""
        self.last_trained = loader
        for each in self:
            # A loader that a `break` has left was an evaluation, unless it was read last.
            if each.pending_ids and (each is loader or not each.left_by_break):
                each.source.train(each)

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
        return all(source.is_caught_up for source in self._sources.values())

    @property
    def can_rewind(self) -> bool:
        """Whether the loaders of the steps can be rewound.

        A rollback then repeats its steps with the same data. Otherwise it restores the weights, and
        continues with the batches that come next. False without a loader.
        """
        loaders = self._of_steps()
        return bool(loaders) and all(loader.can_rewind for loader in loaders)

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
            saved = source.position(leaves=self.epoch_loop.can_return, after_step=after_step)
            if saved is not None:
                sources[name] = saved
        trained = self._trained
        if self.last_trained is not None and self.last_trained.trains:
            trained = self.last_trained.source.name
        return {"epoch": self.epoch_loop.next_epoch, "trained": trained, "sources": sources}

    def forward_positions(self) -> dict[str, SavedPosition]:
        """The positions of sources that cannot be rewound, for a checkpoint.

        A rollback moves all others back. A restart after the rollback, at the same checkpoint, then
        continues where such a source is.
        """
        forward: dict[str, SavedPosition] = {}
        for name, source in self._sources.items():
            if source.trained is not None and not source.trained.can_rewind:
                saved = source.position(leaves=self.epoch_loop.can_return)
                if saved is not None:
                    forward[name] = saved
        return forward

    def skipped_by_source(self) -> dict[str, list[list[int]]]:
        """Ids of all skipped batches, for a checkpoint: a restart would read them again.

        Returns:
            Name of a source -> pairs of epoch and index, sorted.
        """
        return {
            name: [list(batch) for batch in sorted(source.skipped)]
            for name, source in self._sources.items()
            if source.skipped
        }

    def skipped_ids(self) -> frozenset[BatchId]:
        """Ids of all skipped batches, of any source."""
        return frozenset().union(*(source.skipped for source in self._sources.values()))

    def resume_skipped(self, skipped: Mapping[str, Iterable[Iterable[int]]]) -> None:
        """Takes the skipped batches of an earlier process: result of `skipped_by_source`."""
        for name, ids in skipped.items():
            self._source(name).skipped.update(BatchId(*pair) for pair in ids)

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
        last = max(to_skip, default=None)
        for loader in self._of_steps():
            if self.last_trained is None or loader.next_id != self.last_trained.next_id:
                continue
            skipped, end = loader.source.skipped, loader.length
            skipped.update(to_skip)
            if last is not None:
                for index in range(last.index + 1, last.index + 1 + skip_more):
                    if end is None or index < end:
                        skipped.add(BatchId(last.epoch, index))
            skipped.difference_update(read_again)

    def seek(self, position: Mapping[str, Any] | None) -> RewindObstacle | None:
        """Moves the sources to the positions of a checkpoint, at a start and at a rollback.

            does the program read a loader? ── no ──► wait until it begins the saved passes
                   │
            does its loop over epochs return to an earlier one? ── yes ──► the same, if it may
                   │
            rewind the loader of each source ── one of them cannot ──► its obstacle

        If one of the loaders cannot be rewound, all of them continue forward, past the bad batches.

        Args:
            position: result of `position` in this or in an earlier process, or None if the
                checkpoint has no positions.

        Returns:
            Why the steps since the position are not all repeated, or None.
        """
        loaders, epoch_loop = self._of_steps(), self.epoch_loop
        if position is None:
            return RewindObstacle("the checkpoint has no position of this loader")
        if not loaders:
            epoch_loop.next_epoch = position["epoch"]
            self._await_at(position)
            return RewindObstacle("the loop does not read its batches through healcore")
        if self._returns_to(position, loaders[0]):
            if epoch_loop.changed_in is not None and position["epoch"] <= epoch_loop.changed_in:
                return MODEL_CHANGED
            # Also the sources of earlier passes, which the loop will read again.
            for each in (*loaders, *(source.trained for source in self._sources.values())):
                if each is not None and not each.can_rewind:
                    return each.rewind_obstacle
            self._await_at(position)
            epoch_loop.returns_to = position["epoch"]
            return None
        # Loaders that cannot be rewound come first: if one of them fails, no loader has moved.
        for loader in sorted(loaders, key=lambda loader: loader.can_rewind):
            obstacle = loader.source.rewind(loader, position["sources"].get(loader.source.name))
            if obstacle is not None:
                return obstacle
        return None

    def _await_at(self, position: Mapping[str, Any]) -> None:
        """Makes all sources wait until the program begins the saved passes again."""
        self._trained, saved = position["trained"], position["sources"]
        for name in {*self._sources, *saved}:
            self._source(name).await_at(saved.get(name))

    def _returns_to(self, position: Mapping[str, Any], trained: SourceCursor) -> bool:
        """Whether a loop over `Healer.epochs` has to return after a rewind to a position.

            the position is in              does the loop return?
            ------------------------------  ------------------------------------------------------
            an earlier epoch                yes
            an earlier pass of the epoch    yes
            an earlier batch of the pass    yes if the loader has a length. Without a return the
                                            program would count more batches than the loader has,
                                            and many programs divide by this length, or index with
                                            the count. A stream without a length just continues.

        Args:
            position: the positions of the checkpoint.
            trained: the loader of the last step.
        """
        if not self.epoch_loop.can_return:
            return False
        saved = position["sources"].get(trained.source.name)
        is_same_pass = saved is not None and saved["place"] == trained.place
        is_earlier_epoch = position["epoch"] < self.epoch_loop.next_epoch
        return is_earlier_epoch or not is_same_pass or trained.length is not None

    def _of_steps(self) -> list[SourceCursor]:
        """The last trained loader, and the other loaders that a loop reads for steps."""
        last = self.last_trained
        if last is None:
            return []
        return [last, *(each for each in self if each is not last and each.trains and each.in_loop)]
