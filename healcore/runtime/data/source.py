"""`Source`: a named stream of batches, read in passes by one loader or by one after another.

    place     where in the program a pass begins, see `Place`. A restart finds a pass by its place,
              whatever loader object the program reads it with.
    number    the passes that take steps are counted: `BatchId.epoch`.

A pass that no step has used was an evaluation. It has no number of its own, and a restart reads it
again from its first batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from healcore.runtime.data.cursor import Cursor, Limit
from healcore.runtime.data.loaders import batch_size, own_generators, reads_the_same
from healcore.runtime.data.positions import (
    BatchId,
    DataError,
    Place,
    SavedPosition,
    place_of,
)
from healcore.runtime.data.readers import RewindObstacle
from healcore.runtime.data.scan_blocks import ScanBlocks

if TYPE_CHECKING:
    from healcore.runtime.faults.retry import Retries

OTHER_LOADER = RewindObstacle("each epoch has a loader of its own")
"""Reason of a rollback to a place in a loader that is read no more: only the steps of the newest
loader are repeated."""
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
        problem: a sentence about what is wrong with its saved position, or an empty string.
        place: where in the program the newest pass has begun.
        first: number of the first pass of the newest loop.
        since: number of the pass since which the source was read with this loader alone, or with
            others of which it can repeat the epochs.
        start: the position before the first pass of this process.
        named: the epoch that the program has named for the newest pass, or None.
        in_loop: whether a loop reads the loader. A `break` drops the rest of the epoch.
        in_use: whether the body of the loop runs with the last batch. A save now would lose what
            the body does after it.
        left_by_break: whether a `break` has followed the last batch. What the program does then may
            still belong to the batch.
        trains: whether a step has used its batches.
        has_begun_before: whether the random states of the checkpoint are from after the begin of
            its newest pass, so that numbers which the begin draws now are not counted.
        pending_ids: ids of the batches since the last step.
        contents: the batches since the last step, if weights are compared.
        substitute: the batch that replaces an unreadable batch, with several ranks.
    """

    def __init__(
        self, source: Source, loader: Any, limit: Limit, *, retries: Retries | None
    ) -> None:
        super().__init__(loader, retries=retries)
        self.source = source
        self.limit = limit
        self.skipped_batch_ids = source.skipped
        self.problem = ""
        self.place: Place = []
        self.first = self.since = 0
        self.start: SavedPosition = {}
        self.named: int | None = None
        self.in_loop = self.in_use = self.left_by_break = False
        self.trains = self.has_begun_before = False
        self.pending_ids: list[BatchId] = []
        self.contents: list[Any] = []
        self.substitute: Any = None

    @property
    def is_scan(self) -> bool:
        """Whether the batches are blocks of `Healer.scan`, which a rollback never skips."""
        return isinstance(self.loader, ScanBlocks)

    @property
    def first_pending(self) -> BatchId | None:
        """The first batch that was read since the last step, also if reading it has raised."""
        return self.pending_ids[0] if self.pending_ids else self.unreadable

    @property
    def next_pass(self) -> int:
        """Number of the pass that the next loop begins, or continues after a rollback."""
        epoch, index = self.next_id
        is_over = self.is_used_up or (index > 0 and self.in_loop)
        return epoch + is_over

    @property
    def is_open(self) -> bool:
        """Whether a loop over the loader has neither ended nor been left."""
        return self.in_loop and not self.left_by_break

    def begin_pass(self, number: int, epochs: int | None) -> None:
        """Begins a loop over the loader. Drops the rest of a pass that a `break` has left.

        Args:
            number: number of the first pass of the loop.
            epochs: number of passes, or None for no end.
        """
        if self.next_id.epoch != number and not (isinstance(self.loader, Iterator) and self.trains):
            if self.next_id.index > 0:
                self.abandon()
            self.next_id = BatchId(number, 0)
        self.read_epochs(number, epochs)
        self.first, self.in_loop, self.has_begun_before = number, True, False

    def next(self) -> tuple[Any, BatchId]:
        """Reads the next batch, see `Cursor.next`."""
        self.in_loop, self.left_by_break = True, False
        return super().next()

    def leave_by_break(self) -> None:
        """Notes that a `break` has ended the loop body."""
        self.in_use, self.left_by_break = False, True


class Source:
    """A named stream of batches with a position: what `healer.batches(loader, name=)` reads.

    A seek is the only way back, at a start and at a rollback. It moves the loader that reads the
    pass of the position (`rewind`), or waits until the program begins this pass again (`await_at`):

        places      0         1            2         3
        saved       training  evaluation   training, at batch 7
        restart     complete  read again   seek to batch 7

    Args:
        name: the name that the program has given, or an empty string.
        notices: a list that gets sentences for the log.
        retries: the attempts to read a batch after failures in the network, or None for one.

    Attributes:
        skipped: ids of the batches to skip.
        current: the cursor of the newest loop, or None.
        trained: the cursor of the newest step, or None.
        awaited: the position that no loop has begun again yet, or None.
        passes: number of passes that have begun in this epoch of the program, see `Place`.
    """

    def __init__(self, name: str, notices: list[str], retries: Retries | None) -> None:
        self.name = name
        self.skipped: set[BatchId] = set()
        self.current: SourceCursor | None = None
        self.trained: SourceCursor | None = None
        self.awaited: SavedPosition | None = None
        self.passes = 0
        self._evaluations: list[Place] = []
        """Places of the evaluations so far that a restart reads again."""
        self._owed: list[Place] = []
        """Places of the evaluations before the awaited position that a restart reads again."""
        self._is_short = False
        """Whether the loader ends before the position that it has continued at."""
        self._least_pass = 0
        """Number of the next pass while no loader of this process has trained."""
        self._cursors: list[SourceCursor] = []
        self._retries = retries
        self._notices = notices

    @property
    def is_caught_up(self) -> bool:
        """Whether the program has begun all passes again that came before the awaited position."""
        return self.awaited is None and not self._owed and not self._is_short

    @property
    def next_pass(self) -> int:
        """Number of the next pass that takes steps."""
        if self.awaited is not None:
            place = place_of(self.awaited)
            return place.epoch + (self.awaited["left"] and place.index > 0)
        return self._least_pass if self.trained is None else self.trained.next_pass

    def find(self, loader: Any) -> SourceCursor | None:
        """The cursor of a loader, which is compared by identity, or None for a new loader."""
        return next((each for each in self._cursors if each.loader is loader), None)

    # -- a pass begins --------------------------------------------------------------------------

    def begin(
        self,
        loader: Any,
        place: Place,
        epochs: int | None,
        limit: Limit,
        *,
        epoch: int | None,
        evaluates: bool,
        completed: bool,
    ) -> SourceCursor | None:
        """Begins a loop over a loader, which continues at the awaited position at its place.

        Args:
            loader: the user's loader.
            place: where in the program the loop begins.
            epochs: number of passes, or None for no end.
            limit: see `Limit`.
            epoch: the epoch that the program has named, or None.
            evaluates: whether the loop surely takes no step.
            completed: whether the run is complete, so that its last pass is complete too.

        Returns:
            The cursor of the loader, or None if an earlier process has read the pass to its end.

        Raises:
            DataError: another loop reads the source, or the epoch cannot be the loader's next one.
        """
        cursor, now = self.find(loader), self.current
        evaluates = evaluates or place in self._owed
        saved = None if evaluates else self._position_for(place)
        if saved is not None and (place < saved["place"] or completed):
            return None
        if now is not None and now is not cursor and now.is_open:
            raise DataError(
                f"a loop over {now.name} has not ended, or its iterator is still in a variable, "
                'and another loop begins: write healer.batches(loader, name="b") for one of the '
                "two loaders. Each name has its own position in the data"
            )
        self.end_pass()
        if cursor is None:
            cursor = SourceCursor(self, loader, limit, retries=self._retries)
            self._keep(cursor)
        elif epoch is not None and cursor.named is not None and epoch <= cursor.named:
            raise DataError(
                f"epoch {epoch} cannot be the next epoch of {cursor.name}, which is at batch "
                f"{cursor.next_id.index} of epoch {cursor.next_id.epoch}: write `for epoch in "
                "healer.epochs(n)`, and healer.batches(loader, epoch=epoch) once in each epoch"
            )
        is_same_place = saved is not None and place == saved["place"]
        first = saved["first"] if saved is not None and is_same_place else self.next_pass
        if self.awaited is None and self.trained is None and epoch is not None:
            first = max(first, epoch)
        if cursor is not self.trained:
            self._notice_turns(cursor)
            cursor.since = saved["since"] if saved is not None and is_same_place else first
            if self.trained is not None and reads_the_same(loader, self.trained.loader):
                cursor.since = self.trained.since
        cursor.begin_pass(first, epochs)
        cursor.place, cursor.named, self.current = place, epoch, cursor
        cursor.start = cursor.start or cursor.position()
        if evaluates:
            self._owed = [each for each in self._owed if each != place]
            cursor.skipped_batch_ids = set()
        if saved is not None:
            self._take_over(cursor, saved)
        return cursor

    def _position_for(self, place: Place) -> SavedPosition | None:
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

    def _notice_turns(self, cursor: SourceCursor) -> None:
        """Says that a loader has no exact position if another one is read in turn with it."""
        other = self.trained
        if other is not None and cursor.trains and own_generators(cursor.loader):
            self._notices.append(
                f"{cursor.name} and {other.name} take turns, and the first one draws from a "
                "random generator of its own, so its order differs after a restart and after a "
                'rollback: write healer.batches(loader, name="b") for one of the two loaders'
            )

    def _take_over(self, cursor: SourceCursor, saved: SavedPosition) -> None:
        """Moves the loader that begins the awaited pass to its position.

        A function that makes the batches may ask for the epoch meanwhile, which is the awaited one.
        """
        self._owed = [each for each in self._owed if each > cursor.place]
        place = place_of(saved)
        before, size = saved["batch_size"], batch_size(cursor.loader)
        if before != size and None not in (before, size):
            cursor.problem = (
                f"batch size: {before} -> {size} (saved -> given): the loader continues at the "
                "same number of batches, which is another position in the data; to start from the "
                "first batch, pass an empty directory"
            )
        if cursor.rewind(saved):
            if saved["left"]:
                cursor.abandon()
        elif place > cursor.next_id:
            notice = cursor.fast_forward(saved)
            if notice:
                self._notices.append(notice)
        self.awaited, length = None, cursor.length
        self._is_short = length is not None and place.index > length > 0
        cursor.has_begun_before = cursor.can_rewind or cursor.next_id.index > 0 or saved["begun"]
        if place > (0, 0):
            self.train(cursor)

    def train(self, cursor: SourceCursor) -> None:
        """Notes that a step has used batches of a cursor, so that its pass has its number."""
        self.trained = cursor
        cursor.trains = True
        cursor.skipped_batch_ids = self.skipped

    def end_pass(self) -> None:
        """Notes that no step belongs to the newest pass any more, as the program goes on."""
        now = self.current
        if now is not None and now is not self.trained and now.place not in self._evaluations:
            self._evaluations.append(now.place)
            now.skipped_batch_ids = set()  # an evaluation has no numbers of its own to be skipped
            now.pending_ids, now.contents = [], []

    def begin_epoch(self, returning: int | None) -> None:
        """Begins an epoch of the program's loop, or the code after the loop.

        Args:
            returning: number of the loop over `Healer.epochs` that runs or has ended, or None. A
                restart does not run its earlier epochs again.
        """
        self.end_pass()
        self.current = None
        self.passes = 0
        self._evaluations = [e for e in self._evaluations if e[0] != returning or not e[1]]

    def _keep(self, cursor: SourceCursor) -> None:
        """Keeps a new cursor, and forgets the oldest one beyond the maximum."""
        self._cursors.append(cursor)
        if len(self._cursors) > _MAX_CURSORS:
            self._cursors.remove(next(each for each in self._cursors if each is not self.trained))

    # -- positions ------------------------------------------------------------------------------

    def position(self, *, leaves: bool, after_step: bool = False) -> SavedPosition | None:
        """The position after the batch that was read last, or None if no step has used a batch.

        Args:
            leaves: whether a `break` drops the rest of its pass, also after a restart.
            after_step: whether the position is the one after the last step. Batches that were read
                since then belong to the next step.

        Raises:
            DataError: the position after the last step cannot be reached.
        """
        cursor, now = self.trained, self.current
        if self.awaited is not None or cursor is None:
            return self.awaited
        if after_step and cursor.first_pending is not None:
            position, leaves = cursor.position_before(cursor.first_pending), False
            if position is None:
                raise DataError("the loader cannot be rewound to the first batch of the step")
        else:
            position = cursor.position()
        begun = now is not None and now is not cursor
        evaluations = [*self._evaluations]
        if now is not None and begun and not now.is_open and now.place not in evaluations:
            evaluations.append(now.place)
        return {
            **position,
            "place": cursor.place,
            "first": cursor.first,
            "since": cursor.since,
            "batch_size": batch_size(cursor.loader),
            "evaluations": evaluations,
            "begun": begun,
            "left": leaves and cursor.in_loop and cursor.left_by_break,
        }

    def await_at(self, saved: SavedPosition | None) -> None:
        """Waits until the program begins the pass of a position again, after a restart or a return.

        Args:
            saved: the position, or None if the source has trained nothing by then.
        """
        self.awaited, self.trained, self.current = saved, None, None
        self.passes = self._least_pass = 0
        self._evaluations, self._owed = [], [] if saved is None else [*saved["evaluations"]]
        for cursor in self._cursors:
            cursor.named = None
            cursor.in_loop = False
            if cursor.trains:  # also one that the program has begun to read after the position
                cursor.rewind(cursor.start)

    def rewind(self, cursor: SourceCursor, saved: SavedPosition | None) -> RewindObstacle | None:
        """Moves the loader of the newest steps to a position, or at least to its start.

        Args:
            cursor: the cursor of the loader.
            saved: the position of the source, or None if it has trained nothing by then.

        Returns:
            Why the steps since the position are not all repeated, or None.
        """
        place = BatchId(0, 0) if saved is None else place_of(saved)
        if saved is None or place <= (cursor.since, 0):  # perhaps a state of another loader
            saved = {**cursor.start, "epoch": cursor.since}
        if not cursor.rewind(saved):
            return cursor.rewind_obstacle
        cursor.in_loop = False  # a `break` came after this position, so it is undone too
        return OTHER_LOADER if place.epoch < cursor.since else None
