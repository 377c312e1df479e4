"""A loop of the program over the batches of a loader, from its begin to its end.

    _begin         finds where the loader continues, and whether a batch is to be read at all
    _read          reads a batch                                                         <--+
    (body)         the body of the program's loop has the batch                             |
        the body ends:        counts the step, work between two steps                   ----+
        a `break` leaves it:  _leave_body keeps what a restart has to know
    _end           no batch follows: ends the loader, and judges the run if this is its end

`loop_over_batches` calls these steps in this order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from healcore.console import counted
from healcore.runtime.data.cursor import Limit
from healcore.runtime.data.readers import ScanBlocks
from healcore.runtime.data.sources import SourceCursor
from healcore.runtime.driver import HealerError, check_framework
from healcore.runtime.reporting.nonfinite_steps import FROM_START
from healcore.runtime.run.checkpoints.schedule import SaveReason
from healcore.runtime.run.progress import COUNTED, LoopPhase

if TYPE_CHECKING:
    from healcore.runtime.healer import Healer
    from healcore.runtime.run.run import Run

_NO_BATCH = object()
Batch = TypeVar("Batch")
"""The type of a batch of the loader."""


class Batches(Iterator[Batch]):
    """The batches of a loop over `Healer.batches`, with the attributes of the loader.

    A function that gets a loader as its argument can get this object instead: `batches.dataset` is
    the loader's `dataset`, and setting an attribute sets it on the loader.

    Attributes:
        healer: the Healer, for a function that gets only the loader.
    """

    def __init__(
        self, healer: Healer[Any], batches: Iterator[Batch], loader: Any, epochs: int | None
    ) -> None:
        """Wraps an iterator.

        Args:
            healer: the Healer whose loop it is.
            batches: the batches, with the work between two steps after each of them.
            loader: the loader that they come from.
            epochs: passes over the loader, or None for no end.
        """
        # Not by assignment, which would set attributes of the loader.
        vars(self).update(healer=healer, _batches=batches, _loader=loader, _epochs=epochs)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self).get("_loader"), name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._loader, name, value)

    def __next__(self) -> Batch:
        return next(self._batches)

    def __len__(self) -> int:
        """Returns the number of batches in all epochs, also after a restart.

        Raises:
            TypeError: the loader has no length, or the loop has no end.
        """
        if self._epochs is None:
            raise TypeError("batches(..., epochs=None) has no len")
        return self._epochs * len(self._loader)

    def with_state(self) -> Batches[tuple[Batch, Any]]:
        """Returns an iterator over pairs of a batch and the state to start its step from, for JAX.

            for batch, state in healer.batches(loader).with_state():
                state = healer.update(train_step(state, batch))

        Without the pairs a loop has to read `healer.state` for each step: a rollback replaces the
        state.
        """
        return Batches(self.healer, self._pairs(), self._loader, self._epochs)

    def _pairs(self) -> Iterator[tuple[Batch, Any]]:
        """Yields each batch with the live state."""
        for batch in self:
            yield batch, self.healer.state


def loop_over_batches(
    run: Run,
    given: Any,
    epochs: int | None,
    epoch: int | None = None,
    limit: Limit = None,
    *,
    name: str = "",
    by_trainer: bool = False,
) -> Iterator[Any]:
    """Yields the batches, and does the work between two steps after each of them.

    The behaviour of `Healer.batches`. After a rollback the same loop yields the batches of the
    checkpoint again, if the loader can be rewound. An evaluation in the body of a training loop
    only reads: a restart does not repeat the rest of the body, so a save or a rollback waits for
    the training loop (`Loop.work_waits`).

    Nothing happens before the first `next`. Python closes a generator that the program keeps in a
    variable of its module at the end of the process. The run has ended then, and the modules of
    healcore may have lost their names, so nothing is called.

    Args:
        run: the parts of the run.
        given: the program's loader: any iterable of batches, or a function that makes one for each
            epoch.
        epochs: passes over the loader, or None for no end.
        epoch: number of the epoch in the program's own loop, or None.
        limit: number of an epoch -> max batches of it, or None for no limit. Trainers have one.
        name: name of the source that the loader belongs to.
        by_trainer: whether a trainer reads, see `Sources.begin`.

    Raises:
        DataError: the loader cannot be iterated over, or another loop reads the source.
        RunStopped, Terminated, EndRequested: as in `Healer.batches`.
    """
    loop, state, hang_guard = run.loop, run.loop.state, run.hang_guard
    begin = partial(run.loaders.begin, given, epochs, epoch, limit, name=name)
    loader = _begin(run, given, epoch, partial(begin, by_trainer=by_trainer))
    if loader is None:
        return
    # A rollback that returns to an earlier epoch of a loop over `epochs` drops the rest of this.
    epoch_loop = run.loaders.epoch_loop
    while epoch_loop.returns_to is None or not loader.trains:
        batch = _read(run, loader)
        if batch is _NO_BATCH:
            if loop.roll_back_at_end(loader) is not None:
                continue  # the loader has more batches
            _end(run, loader, is_numbered=epoch is not None)
            return
        hang_guard.watch()  # the time of the body counts as a step
        in_outer_body, state.in_body = state.in_body, True
        try:
            yield batch
            state.in_body = in_outer_body
        except GeneratorExit:  # the program has left its loop by `break`
            if run.end is None:
                _leave_body(run, loader, in_outer_body=in_outer_body)
            raise
        finally:
            if run.end is None:
                loader.in_use = False
        loop.queue_dispatch()
        if not loop.work_waits(loader):
            loop.after_step(counted=True)
    hang_guard.pause()
    loader.in_loop = False


def _begin(
    run: Run, given: Any, epoch: int | None, begin: Callable[..., SourceCursor | None]
) -> SourceCursor | None:
    """Begins the loop over the loader, at its saved position; see `Sources.begin`.

    Restores the random states of a checkpoint where the loader continues within an epoch.

    Returns:
        The loader with its position. None if the loop yields nothing: a loop over `epochs` is about
        to return to an earlier epoch, or an earlier process has completed the pass.
    """
    loop, state, loaders, random_states = run.loop, run.loop.state, run.loaders, run.data_state
    loop.queue_dispatch()
    known, broken_off = loaders.find(given), loaders.place_of_break
    trained = known is not None and known.trains
    if loop.returns_to_epoch and (known is None or trained):
        return None
    random_states.restore()  # for an epoch that begins, and draws, after the checkpoint
    completed = state.is_complete
    loader = begin(completed=completed)
    if loader is None:
        if completed:
            random_states.restore()  # the program draws on as after the end of the run
        elif not any(each.in_use for each in loaders):
            random_states.begin_pass(ended=True)
        return None
    if loader.was_moved:
        random_states.restore()  # a move has drawn; an epoch that begins keeps its draws
    while loaders.notices:
        run.log.note(run.progress.step, f"data: {loaders.notices.pop(0)}")
    if trained:  # what the code before this pass has changed
        run.saver.keep_weight_sample()
    if loop.work_waits(loader):
        if state.phase in COUNTED:
            state.phase = LoopPhase.EVALUATION
    elif loop.after_step(counted=True) is None and broken_off is not None:
        # Until a later epoch begins, possibly with a new loader, the `break` may also end the
        # training, which a restart then continues in the same epoch.
        if loader is loaders.last_trained:
            begins = loader.next_id.epoch
        else:
            begins = -1
        if max(begins, -1 if epoch is None else epoch) > broken_off.epoch:
            _save_after_break(run)
    return loader


def _save_after_break(run: Run) -> None:
    """Saves the checkpoint of this step once more, if a `break` has followed its first save.

    The first save has a place within an epoch that the `break` has ended, and a restart or a
    rollback would read the rest of this epoch. In JAX, `update` saves before the `break`; in torch,
    the program may call `Healer.save` after it. Several ranks do not save again: a save is
    collective, and perhaps only some of them have left their loop by `break`.
    """
    is_saved = run.schedule.last_saved == run.progress.step and run.progress.steps_taken
    may_save = run.schedule.may_save and not run.step_batches.within_batch
    if is_saved and may_save and run.ranks.world == 1 and not run.loop.has_trainer:
        run.saver.save_state_as(run.progress.step, SaveReason.REGULAR)


def _read(run: Run, loader: SourceCursor) -> Any:
    """Reads the next batch of the loader; `_NO_BATCH` after the last one.

    A signal ends a run of one process while it waits for a batch (Terminated, Interrupted), but not
    within a step or an evaluation.
    """
    run.hang_guard.watch()
    may_end = run.step_batches.between_steps
    may_end = may_end and run.loop.state.phase is not LoopPhase.EVALUATION
    loader.in_loop, loader.left_by_break = True, False
    try:
        with run.end_requests.waiting_for_data() if may_end else nullcontext():
            batch = run.step_batches.read(loader)
    except StopIteration:
        run.hang_guard.pause()
        return _NO_BATCH
    finally:
        skipped, loader.passed_over = loader.passed_over, []
        if skipped:
            line = f"{counted(len(skipped), 'batch', 'batches')} skipped"
            run.log.note(run.progress.step, line, batches=[[*each] for each in skipped])
    if run.data_state.of_checkpoint is not None and run.loaders.is_caught_up:
        run.data_state.of_checkpoint = None
    loader.in_use = True
    return batch


def _leave_body(run: Run, loader: SourceCursor, *, in_outer_body: bool) -> None:
    """Notes that a `break` has left the body, so that the run may not be complete."""
    state = run.loop.state
    run.hang_guard.pause()
    loader.leave_by_break()
    if loader.trains:
        return
    if state.has_taken_yielded_step:
        run.loaders.forget_pending(loader)  # an evaluation: no step uses its batches
    if state.reached_end:  # an evaluation after the training
        state.in_body = in_outer_body


def _end(run: Run, loader: SourceCursor, *, is_numbered: bool) -> None:
    """Ends the loop after the last batch, and judges the run if no other loop may follow.

    Args:
        run: the parts of the run.
        loader: the loader that has ended.
        is_numbered: whether the program has named the epoch, which is one of several then.
    """
    loop, loaders = run.loop, run.loaders
    if loop.state.phase is LoopPhase.EVALUATION:
        loop.state.phase = LoopPhase.REST_OF_BODY
    trains = not loop.work_waits(loader)
    if not trains and loader is loaders.last_trained:
        # After a restart, until the training data have their place again; or a loop over
        # `steps`, which has no loader.
        loaders.last_trained = run.step_batches.last_read = None
    if loader is not loaders.last_trained:
        run.step_batches.end_evaluation(loader)
    if not loop.is_evaluation(loader):  # a pass of the program's loop has ended
        run.data_state.begin_pass(ended=True)
    loader.in_loop = False
    is_one_of_several = is_numbered or loaders.epoch_loop.can_return
    if trains and loader.trains and not is_one_of_several and run.progress.step >= FROM_START:
        loop.judge_at_end()


def loop_over_blocks(
    run: Run, update: Callable[..., Any], state: Any, blocks: ScanBlocks, *, donate: bool
) -> tuple[Any, Any]:
    """Dispatches blocks of updates that JAX compiles as a whole; see `Healer.scan`.

    A block is the batch of this loop: the work between two steps follows each block.

    Args:
        run: the parts of the run.
        update: the program's function.
        state: the state to begin with.
        blocks: the blocks of updates, which are the batches of this loop.
        donate: whether a block reuses the memory of the state that it begins with.

    Returns:
        The last state, and the outputs of all updates.
    """
    check_framework(run.driver, "JAX", "healer.scan(...)")
    if run.driver.state_is_in_place:
        raise HealerError(
            "healer.scan takes a pytree as state, and this Healer's state is of nnx objects, which "
            "change in place: split them, graphdef, state = nnx.split((model, optimizer)), and "
            "merge them in `update`"
        )
    scan = run.driver.begin_scan(update, state, donate=donate)
    epoch_loop = run.loaders.epoch_loop
    if epoch_loop.can_return:
        epoch = epoch_loop.next_epoch
    else:
        epoch = None
    for _ in loop_over_batches(run, blocks, 1, epoch):
        scan.run(blocks.first, blocks.count)
    run.loop.state.reached_end = True
    return run.driver.live, scan.outputs()
