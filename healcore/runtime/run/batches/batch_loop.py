"""`BatchLoop`: a loop of the program over the batches of a loader, from its begin to its end.

    _begin         finds where the loader continues, and whether a batch is to be read at all
    _read          reads a batch, or rolls back the last steps at the end of the data    <--+
    _enter_body    the body of the program's loop has the batch                             |
        the body ends:        _end_body      counts the step, work between two steps    ----+
        a `break` leaves it:  _leave_body    keeps what a restart has to know
    _end           no batch follows: ends the loader, and judges the run if this is its end

`BatchLoop.batches` calls these steps in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from healcore.console import counted
from healcore.runtime.data.positions import BatchId
from healcore.runtime.data.scan_blocks import ScanBlocks
from healcore.runtime.data.source import SourceCursor
from healcore.runtime.reporting.nonfinite_steps import FROM_START

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class BatchLoop:
    """One loop over the batches of a loader; the behaviour of `Healer.batches`.

    After a rollback the same loop yields the batches of the checkpoint again, if the loader can be
    rewound. An evaluation in the body of a training loop only reads: a restart does not repeat the
    rest of the body, so a save or a rollback waits for the training loop (`Loop.work_waits`).

    Args:
        run: the parts of the run.
        given: the program's loader: any iterable of batches, or a function that makes one for each
            epoch.
        epochs: passes over the loader, or None for no end.
        epoch: number of the epoch in the program's own loop, or None.
        limit: number of an epoch -> max batches of it, or None for no limit. Trainers have one.
        name: name of the source that the loader belongs to.
        by_trainer: whether a trainer reads, see `Sources.begin`.
    """

    def __init__(
        self,
        run: Run,
        given: Any,
        epochs: int | None,
        epoch: int | None = None,
        limit: Callable[[int], int] | None = None,
        *,
        name: str = "",
        by_trainer: bool = False,
    ) -> None:
        self._run = run
        self._loop = run.loop
        self._state = run.loop.state
        self._given = given
        self._epochs = epochs
        self._epoch = epoch
        self._limit = limit
        self._name = name
        self._by_trainer = by_trainer
        self._loader: SourceCursor
        """The loader with its position, set by `_begin`."""
        self._batch: Any = None
        """The batch that `_read` has read last."""
        self._is_exhausted = False
        """Whether the loader has no further batch, and no rollback has brought one back."""
        self._in_outer_body = False
        """Whether this loop runs in the body of another loop of the program."""

    def batches(self) -> Iterator[Any]:
        """Yields the batches, and does the work between two steps after each of them.

        Nothing happens before the first `next`. Python closes a generator that the program keeps in
        a variable of its module at the end of the process. The run has ended then, and the modules
        of healcore may have lost their names, so nothing is called.

        Raises:
            DataError: the loader cannot be iterated over, or `epoch` cannot be its next epoch.
            RunStopped, Terminated, EndRequested: as in `Healer.batches`.
        """
        if not self._begin():
            return
        while self._read():
            self._enter_body()
            try:
                yield self._batch
                self._state.leave_body(in_outer_body=self._in_outer_body)
            except GeneratorExit:  # the program has left its loop by `break`
                if not self._state.run_has_ended:
                    self._leave_body()
                raise
            finally:
                if not self._state.run_has_ended:
                    self._loader.in_use = False
            self._end_body()
        if self._is_exhausted:
            self._end()

    def _begin(self) -> bool:
        """Begins the loop over the loader, at its saved position; see `Sources.begin`.

        Restores the random states of a checkpoint where the loader continues within an epoch.

        Returns:
            False if the loop yields nothing: a loop over `epochs` is about to return to an earlier
            epoch, or an earlier process has completed the pass.
        """
        run, loop, state = self._run, self._loop, self._state
        loaders, random_states = run.loaders, run.data_state
        loop.queue_dispatch()
        known = loaders.find(self._given)
        if loop.returns_to_epoch and (known is None or known.trains):
            return False
        broken_off = loaders.place_of_break
        random_states.restore()  # for an epoch that begins, and draws, after the checkpoint
        begun = loaders.begin(
            self._given,
            self._epochs,
            self._epoch,
            self._limit,
            name=self._name,
            by_trainer=self._by_trainer,
            completed=state.is_complete,
        )
        if begun is None:
            if state.is_complete:
                random_states.restore()  # the program draws on as after the end of the run
            elif not any(each.in_use for each in loaders):
                random_states.begin_pass(ended=True)
            return False
        self._loader = begun
        if begun.has_begun_before:
            random_states.restore()  # a rewind has drawn; an epoch that begins keeps its draws
        if begun.problem:
            run.log.problem(run.progress.step, begun.problem)
        while loaders.notices:
            line = loaders.notices.pop(0)
            run.log.note(run.progress.step, f"data: {line}")
        if known is not None and known.trains:  # what the code before this pass has changed
            run.saver.keep_weight_sample()
        if loop.work_waits(begun):
            state.begin_evaluation()
        # After a `break` the loop continues from `self._loader`.
        elif loop.after_step() is None and broken_off and self._has_left_epoch(broken_off):
            loop.save_after_break()
        return True

    def _has_left_epoch(self, place: BatchId) -> bool:
        """Whether this loop begins a later epoch than the epoch that a `break` has left.

        Until then the `break` may also end the training, which a restart then continues in the same
        epoch.

        Args:
            place: the next batch of the broken-off epoch, see `Sources.place_of_break`.
        """
        if self._epoch is not None and self._epoch > place.epoch:
            return True  # possibly with a new loader
        is_same_loader = self._loader is self._run.loaders.last_trained
        return is_same_loader and self._loader.next_id.epoch > place.epoch

    def _read(self) -> bool:
        """Reads the next batch into `self._batch`. After a rollback the loader has more batches.

        Returns:
            False if no batch follows: the loader is exhausted, or the rest of the epoch is dropped,
            because a rollback returns to an earlier epoch of a loop over `epochs`.
        """
        loop, loader = self._loop, self._loader
        hang_guard = self._run.hang_guard
        while not (loop.returns_to_epoch and loader.trains):
            try:
                hang_guard.watch()
                self._batch = self._next()
                return True
            except StopIteration:
                hang_guard.pause()
                if loop.roll_back_at_end(loader) is None:
                    self._is_exhausted = True
                    return False
            finally:
                self._log_skipped()
        hang_guard.pause()
        loader.in_loop = False
        return False

    def _next(self) -> Any:
        """Reads the next batch of the loader. Raises StopIteration after the last epoch.

        A signal ends a run of one process while it waits for a batch (Terminated, Interrupted), but
        not within a step or an evaluation.
        """
        run, loader = self._run, self._loader
        may_end = run.step_batches.between_steps and not self._state.in_evaluation
        with run.end_requests.waiting_for_data() if may_end else nullcontext():
            batch, batch_id = run.batch_reader.read(loader, run.progress.step)
        if run.loaders.is_caught_up:
            run.data_state.forget()
        run.step_batches.add(loader, batch, batch_id)
        loader.in_use = True
        return batch

    def _log_skipped(self) -> None:
        """Logs the batches that the loader has skipped since the last call, if there are any."""
        batches = [list(each) for each in self._loader.take_skipped()]
        if batches:
            skipped = f"{counted(len(batches), 'batch', 'batches')} skipped"
            self._run.log.note(self._run.progress.step, skipped, batches=batches)

    def _enter_body(self) -> None:
        """Notes that the body of the program's loop runs, whose time counts as a step."""
        self._run.hang_guard.watch()
        self._in_outer_body = self._state.enter_body()

    def _leave_body(self) -> None:
        """Notes that a `break` has left the body, so that the run may not be complete."""
        loader, state = self._loader, self._state
        self._run.hang_guard.pause()
        loader.leave_by_break()
        if state.has_taken_yielded_step and not loader.trains:
            loader.pending_ids = []  # an evaluation: no step uses its batches
        if state.reached_end and not loader.trains:  # an evaluation after the training
            state.leave_body(in_outer_body=self._in_outer_body)

    def _end_body(self) -> None:
        """Counts the step of the body, and does the work between two steps."""
        loop = self._loop
        loop.queue_dispatch()
        if not loop.work_waits(self._loader):
            loop.after_step()

    def _end(self) -> None:
        """Ends the loop after the last batch, and judges the run if no other loop may follow."""
        loop, loader = self._loop, self._loader
        self._state.end_evaluation()
        trains = not loop.work_waits(loader)
        loaders, step_batches = self._run.loaders, self._run.step_batches
        if not trains and loader is loaders.last_trained:
            # After a restart, until the training data have their place again; or a loop over
            # `steps`, which has no loader.
            loaders.last_trained = step_batches.last_read = None
        if loader is not loaders.last_trained:
            step_batches.end_evaluation(loader)
        if not loop.is_evaluation(loader):  # a pass of the program's loop has ended
            self._run.data_state.begin_pass(ended=True)
        loader.in_loop = False
        if not trains or not loader.trains:
            return
        # A pass with a number is one of several, and so is perhaps a pass of few steps.
        is_one_of_several = self._epoch is not None or self._run.loaders.epoch_loop.can_return
        if not is_one_of_several and self._run.progress.step >= FROM_START:
            loop.judge_at_end()


def loop_over_blocks(run: Run, blocks: ScanBlocks, dispatch: Callable[[int, int], None]) -> None:
    """Dispatches blocks of updates that JAX compiles as a whole; see `Healer.scan`.

    A block is the batch of this loop: the work between two steps follows each block.

    Args:
        run: the parts of the run.
        blocks: the blocks of updates, which are the batches of this loop.
        dispatch: dispatches a block. It takes the number of the block's first update, and the
            number of updates in the block.

    Raises:
        RunStopped, Terminated, EndRequested: as in `Healer.batches`.
    """
    epoch = None
    if run.loaders.epoch_loop.can_return:  # in a loop over `epochs`
        epoch = run.loaders.epoch_loop.next_epoch
    for _ in BatchLoop(run, blocks, 1, epoch).batches():
        dispatch(blocks.first, blocks.count)
    run.loop.state.reach_end()
