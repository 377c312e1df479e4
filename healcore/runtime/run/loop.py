"""`Loop`: what happens between two steps of a run, for every kind of training loop.

A program hands its loop over to the Healer (`batches`, `epochs`, `steps`, `scan`), or calls the
Healer in a loop of its own (`after_step`, `update`). Trainers do the same through `TrainerAccess`.
All of these calls end in `Loop._between_steps`, which has the order of the work:

    the program's step            Loop                                   phase
    ------------------            ----                                   -----
    batch is read, loss,                                                 BEFORE_STEP
    optimizer.step()
                                  queue_dispatch: counts the step,       AFTER_STEP
                                  queues its records for the host
    rest of the body
                                  _between_steps: reads the records      BEFORE_STEP
                                  of an earlier step, rolls back or
                                  saves, compares weights, ends

The host reads a record a fixed number of steps later, so that it does not wait for the device (see
`steps.LAG`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from healcore.core.decision import Action, names_of
from healcore.core.errors import HealcoreError
from healcore.runtime.data.run_loader import RunLoader
from healcore.runtime.data.scan_blocks import ScanBlocks
from healcore.runtime.driver import WEIGHTS
from healcore.runtime.reporting.nonfinite_steps import FROM_START
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.ending.exits import AlreadyCompleted, IncompleteRun
from healcore.runtime.run.ending.judgement import stop_if_not_trained
from healcore.runtime.run.loop_phase import LoopPhase
from healcore.runtime.run.loop_use import LoopUse
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.program_watch import MAX_ITERATIONS, StructureChanges, WarmUp
from healcore.runtime.run.steps import StepResult

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_MAX_WITHOUT_STEP = 100
"""Batches without a step after which a run may end. Fewer may be a gradient accumulation."""


class Loop:
    """The work between two steps, for every kind of loop. It is not thread-safe.

    Attributes:
        phase: what the loop waits for, see `LoopPhase`.
        has_trainer: whether a trainer (Lightning, Hugging Face) owns the loop, so that an early end
            is not a `break`.
        use: how the program uses the loop, for the end of the run.
        reading_error: error of the program that the reading of a step has shown, such as a step
            from an older state in JAX, or None. Nothing is saved after it.
        in_evaluation: whether an evaluation in the body of the training loop has begun, and has not
            read its last batch. A restart would not repeat the rest of it.
    """

    def __init__(self, run: Run, *, has_trainer: bool) -> None:
        self.run = run
        self.phase = LoopPhase.BEFORE_STEP
        self.has_trainer = has_trainer
        self.use = LoopUse(run)
        self.reading_error: HealcoreError | None = None
        self.in_evaluation = False
        self._has_random_states = False
        """Whether the random states of the checkpoint were restored for the loop that runs."""
        self._update_rolled_back = False
        """Whether an `update` since the last `after_step` has rolled back."""
        self._yielded_step: int | None = None
        """Index of the step that a loop over `steps` has yielded and whose body runs, or None
        outside of a body."""
        self._step_is_epoch = False
        """Whether each epoch of a loop over `epochs` is one step without `batches`."""
        self._structure = StructureChanges(run)
        self._counted_in_body = False
        """Whether the body has continued after its step was counted, see `count_in_body`."""

    def on_step(self) -> None:
        """Called by the driver after each optimizer step, within the body of the loop."""
        self.run.hang_guard.on_step()
        self.run.saver.keep_weight_sample()

    def continue_by_step_number(self) -> None:
        """Begins or continues a loop that has data of its own and knows the number of the step.

        A restart restores random states here, because the loop has no loader that does so. A loop
        that asks for the number of the step has not lost count, so `own_count_obstacle` is gone.
        """
        self.use.own_count_obstacle = ""
        if not self._has_random_states:
            self._has_random_states = True
            self.run.pass_states.restore()

    def epochs(self, total: int) -> Iterator[int]:
        """Yields the numbers of the epochs; the behaviour of `Healer.epochs`.

        If the first epoch is one step without `batches`, the rest of the loop counts steps as
        `steps` does, so that each epoch gets the work between two steps.

        Args:
            total: number of the epoch at which the loop ends.

        Raises:
            RunStopped, Terminated, EndRequested: as in `Healer.batches`, if epochs are steps.
        """
        loaders = self.run.loaders
        loaders.epoch_loop.total_epochs = total
        self.use.own_count_obstacle = ""
        if self.phase is LoopPhase.COMPLETED:
            loaders.pass_over_completed()
            self.use.reached_end = True
            return
        epoch = loaders.epoch_loop.next_epoch
        try:
            while epoch < total:
                self.run.pass_states.begin_pass()
                if self._steps_are_epochs(epoch):
                    self._step_is_epoch = True
                    for number in self.steps(total):
                        loaders.epoch_loop.next_epoch = number
                        yield number
                    return
                loaders.begin_epoch(epoch)
                self.use.in_body = True
                yield epoch
                self.use.in_body = False
                if loaders.epoch_loop.returns_to is None:
                    epoch += 1
                    loaders.epoch_loop.next_epoch = epoch
                    self.run.saver.keep_random_states()
                    self.run.saver.keep_weight_sample()
                else:
                    epoch = self._return_to_epoch()
            self._judge_at_end()
            self.use.reached_end = True
        finally:
            loaders.epoch_loop.can_return = False

    def _steps_are_epochs(self, epoch: int) -> bool:
        """Whether each earlier epoch of this loop was one step, without a loader.

        Args:
            epoch: the epoch that begins. In epoch 0 of a new run nothing is known yet.
        """
        progress, loaders = self.run.progress, self.run.loaders
        if not loaders.is_empty or not (epoch > 0 or progress.resumed_here):
            return False
        # If the code after the step of epoch 0 raises, the checkpoint has step 1, epoch 0.
        return progress.step + self.run.driver.pending_steps() == max(epoch, 1)

    def _return_to_epoch(self) -> int:
        """Continues a loop over `epochs` at the epoch of a rollback, and returns the epoch.

        The program's code after the pass has run with the restored state (an evaluation, the step
        of a scheduler), so the state is restored once more.
        """
        self.run.restorer.restore_again(self.run.progress.step)
        epoch = self.run.loaders.return_to_epoch()
        self.run.log.info(
            f"step {self.run.progress.step}: healer.epochs yields epoch {epoch} again"
        )
        return epoch

    @property
    def returns_to_epoch(self) -> bool:
        """Whether the rest of this epoch is dropped, because the run was rolled back before it."""
        return self.run.loaders.epoch_loop.returns_to is not None

    def steps(self, total: int, warmup: int | None = None) -> Iterator[int]:
        """Yields the numbers of the steps; the behaviour of `Healer.steps`.

        Args:
            total: number of optimizer steps at which the loop ends.
            warmup: iterations that may pass before the first step, or None for the default of
                `WarmUp`.

        Raises:
            IncompleteRun: too many iterations took no step.
            RunStopped, Terminated, EndRequested: as in `Healer.batches`.
        """
        progress = self.run.progress
        warm_up = WarmUp(self.run, total, warmup)
        self._has_random_states = False
        self.run.recovery.begin_counted_steps()
        if self.phase is LoopPhase.COMPLETED:
            self.run.loaders.pass_over_completed()
            self.use.reached_end = True
            return
        while True:
            rolled_back = self.after_step()
            warm_up.count(rolled_back=rolled_back)
            if progress.step < total:
                self._yielded_step = progress.step
                self.use.in_body = True
                yield progress.step
                self.use.in_body = False
                self._yielded_step = None
            elif not self.after_step(last=True):
                self.use.reached_end = True
                return
            # Otherwise the last steps were rolled back, and the loop repeats them.

    def batches(
        self,
        loader: Any,
        epochs: int | None,
        epoch: int | None = None,
        limit: Callable[[int], int] | None = None,
    ) -> Iterator[Any]:
        """Yields the batches of a loader, and does the work between two steps after each of them.

        After a rollback the same iterator yields the batches of the checkpoint again, if the loader
        can be rewound. An evaluation in the body of a training loop only reads: a restart does not
        repeat the rest of the body, so a save or rollback waits for the training loop.

        Args:
            loader: any iterable of batches, or a function that makes one for each epoch.
            epochs: passes over the loader, or None for no end.
            epoch: number of the epoch in the program's own loop, or None.
            limit: number of an epoch -> max batches of it, or None for no limit. Trainers have one.

        Raises:
            DataError: the loader cannot be iterated over, or `epoch` cannot be its next epoch.
            RunStopped, Terminated, EndRequested: as in `Healer.batches`.
        """
        batches, progress, hang_guard = self.run.batches, self.run.progress, self.run.hang_guard
        self.queue_dispatch()
        known = self.run.loaders.find(loader)
        if self.returns_to_epoch and (known is None or known.trains):
            return
        if self.phase is LoopPhase.COMPLETED and self.run.loaders.is_of_completed_run(
            loader, epoch
        ):
            return
        acts = not self._is_evaluation(known)
        if not acts:
            self.in_evaluation = self._counted_in_body = True
        begun = batches.begin(loader, epochs, epoch, limit)
        self._has_random_states = True
        if known is not None and known.trains:  # what the code before this pass has changed
            self.run.saver.keep_weight_sample()
        if acts:  # after a `break` the loop continues from `begun`
            self.after_step()
        has_stepped = False  # in the body of the last batch
        while True:
            if self.returns_to_epoch and begun.trains:
                hang_guard.pause()
                begun.leave_loop()
                return
            try:
                hang_guard.watch()
                batch = batches.next(begun, directly_after_step=has_stepped)
            except StopIteration:
                hang_guard.pause()
                if not self._roll_back_at_end(begun):
                    break
                has_stepped = False
                continue
            finally:
                batches.log_skipped(begun)
            hang_guard.watch()
            in_outer_body = self.use.in_body
            self.use.in_body = True
            try:
                yield batch
                self.use.in_body = in_outer_body
            except GeneratorExit:  # the loop was left by `break`
                hang_guard.pause()
                begun.leave_by_break()
                if self._has_taken_yielded_step and not begun.trains:
                    begun.pending_ids = []  # an evaluation: no step uses its batches
                if self.use.reached_end and not begun.trains:  # an evaluation after the training
                    self.use.in_body = in_outer_body
                raise
            finally:
                begun.end_use()
            step_before = progress.step
            self.queue_dispatch()
            has_stepped = progress.step > step_before
            if not self._is_evaluation(begun):
                self.after_step()
        self.in_evaluation = False
        evaluates = self._is_evaluation(begun)
        batches.end(begun, evaluates=evaluates)
        # A pass with a number is one of several, as a pass of few steps may be.
        may_be_last = (
            epoch is None
            and not self.run.loaders.epoch_loop.can_return
            and progress.step >= FROM_START
        )
        if may_be_last and begun.trains and not evaluates:
            self._judge_at_end()

    def scan(self, blocks: ScanBlocks, dispatch: Callable[[int, int, int], None]) -> None:
        """Dispatches blocks of updates that JAX compiles as a whole; see `Healer.scan`.

        A block is the batch of this loop: the work between two steps follows each block.

        Args:
            blocks: the blocks of updates, which are the batches of this loop.
            dispatch: dispatches a block. It takes the number of the block's first update, the
                number of updates in the block, and the number of updates in the next block, or 0.
        """
        loaders = self.run.loaders
        epoch = None
        if loaders.epoch_loop.can_return:  # in a loop over `epochs`
            epoch = loaders.epoch_loop.next_epoch
        for _ in self.batches(blocks, 1, epoch):
            dispatch(blocks.first, blocks.count, blocks.next_count)
        self.use.reached_end = True

    def _is_evaluation(self, loader: RunLoader | None) -> bool:
        """Whether an evaluation in the body of a training loop reads this loader.

        A restart does not repeat the rest of the body, so the work between two steps waits for it.
        """
        if loader is not None and loader.trains:
            return False
        for each in self.run.loaders:
            if each.in_use and each.trains:
                return True
        return self._has_taken_yielded_step

    @property
    def _has_taken_yielded_step(self) -> bool:
        """Whether the body of a loop over `steps` has taken its step. What follows evaluates."""
        return self._yielded_step is not None and self.run.progress.step > self._yielded_step

    def after_step(self, *, last: bool = False) -> bool:
        """Does the work between two steps in a loop that reads its own batches.

        Args:
            last: whether the loop ends after this step unless the run is rolled back. All pending
                steps are read, and nothing is saved.

        Returns:
            Whether the run was rolled back, here or in an `update` since the last call.
        """
        rolled_back = self._between_steps(last=last) or self._update_rolled_back
        self._update_rolled_back = False
        if last and not rolled_back:
            self._judge_at_end()
        return rolled_back

    def _judge_at_end(self) -> None:
        """Stops a run that has not trained, before the code after its loop uses the weights.

        Ranks may end their loops at different steps, and the judgement is collective, so a run of
        several ranks is judged at the end of the block only.

        Raises:
            RunStopped: the run has not trained.
        """
        in_outer_loop = self._yielded_step is not None
        if self.is_complete or self.has_trainer or in_outer_loop or self.run.ranks.world > 1:
            return
        if self.run.progress.steps_taken:
            stop_if_not_trained(self.run)

    def update(self, take_state: Callable[[], None]) -> None:
        """Takes the state of a step in JAX, and does the work between two steps.

        At the last batch it also does the work at the end of the data: the program takes the state
        from `update`, so a later rollback would not reach it.

        Args:
            take_state: gives the state of the step to the driver.

        Raises:
            IncompleteRun: the loop counts steps itself, and a checkpoint has replaced its snapshot.
        """
        if self.use.own_count_obstacle:
            raise IncompleteRun(f"healcore: {self.use.own_count_obstacle}")
        take_state()
        loader = self.run.loaders.last_trained
        rolled_back = self._between_steps()
        if not rolled_back and loader is not None and loader.in_use and loader.at_end:
            rolled_back = self._roll_back_at_end(loader)
        self._update_rolled_back |= rolled_back

    def _between_steps(self, *, last: bool = False) -> bool:
        """Does the work between two steps, in the order of the drawing at the top of this file.

        Args:
            last: as for `after_step`.

        Returns:
            Whether the run was rolled back. The rest of the work is done after the next step then.
        """
        run, step_batches = self.run, self.run.step_batches
        run.hang_guard.pause()
        self.use.was_used = True
        self.in_evaluation = False
        self.queue_dispatch()
        if self.use.own_count_obstacle or not self._has_random_states:
            self.continue_by_step_number()
        has_stepped = self.phase is LoopPhase.AFTER_STEP
        if has_stepped:  # what the rest of the body has changed belongs to the step
            run.saver.keep_weight_sample()
            if self._counted_in_body:
                run.saver.keep_random_states()
                self._counted_in_body = False
        if self.phase is not LoopPhase.COMPLETED:
            self.phase = LoopPhase.BEFORE_STEP
        if last:
            return (has_stepped and self._skip_if_nonfinite()) or self._roll_back_at_end()
        if has_stepped:
            self._structure.note()
            if self.read_and_act() or self._skip_if_nonfinite() or self._save_when_due():
                return True
            if run.holding.freezing_changes(run.progress.step):
                if self.read_and_act(every=True):
                    return True
                run.holding.update_freezing(run.progress.step)
            run.end_requests.vote_when_due(run.progress.step, run.log)
            run.saver.poll()
        self.log_warnings()
        waiting = len(step_batches.pending_ids)
        if waiting in (_MAX_WITHOUT_STEP, MAX_ITERATIONS):
            self._warn_of_unseen_steps(waiting)
        # Within an accumulation the state cannot be saved, so the run ends after the accumulation.
        may_end = step_batches.between_steps or waiting >= _MAX_WITHOUT_STEP
        run.end_requests.raise_or_propose(may_end=may_end)
        return False

    def _warn_of_unseen_steps(self, waiting: int) -> None:
        """Warns a loop that reads batches and takes no step of an optimizer in the state.

        Such a program may train an optimizer that is not in the state. Then its weights change
        before the first step, or it reads more batches than any gradient accumulation.

        Args:
            waiting: number of batches since the last step.
        """
        run, step, loader = self.run, self.run.progress.step, self.run.step_batches.last_read
        weights_change = False
        if waiting == _MAX_WITHOUT_STEP and not step:
            weights_change = run.driver.settings()[WEIGHTS] != run.record.settings.get(WEIGHTS)
        trains = loader is not None and (loader.trains or not step)
        if trains and (weights_change or waiting == MAX_ITERATIONS):
            obstacle = "the state needs the optimizer whose step() the loop calls"
            self.warn(f"{waiting} batches without a step that the Healer sees: {obstacle}")

    def mark_step_unfinished(self) -> None:
        """Says that a trainer has ended an epoch, and still has to evaluate, log or save."""
        if self.phase is LoopPhase.BEFORE_STEP:
            self.phase = LoopPhase.EPOCH_END

    @property
    def is_complete(self) -> bool:
        """Whether an earlier process has completed the run, so that this one trains nothing."""
        return self.phase is LoopPhase.COMPLETED

    @property
    def has_unfinished_work(self) -> bool:
        """Whether an evaluation in the body of the loop, or the work of a trainer, is incomplete.

        An exception then leaves the work of the step incomplete, so nothing is saved. A trainer has
        stepped, and still has to evaluate, log or save after the step. In a loop of the program
        that does not evaluate, the state after a step is saved.
        """
        if self.phase is LoopPhase.AFTER_STEP:
            return self.has_trainer or self.in_evaluation
        return self.phase is LoopPhase.EPOCH_END

    def queue_dispatch(self) -> None:
        """Counts and queues the dispatch since the last call. The next `_between_steps` acts.

        A dispatch is what the program gives to the device at once: a step, or a block of steps.

        Raises:
            AlreadyCompleted: an earlier process has completed the run.
        """
        run = self.run
        pending = run.driver.take_dispatch()
        if pending is None:
            return
        if self.phase is LoopPhase.COMPLETED:
            raise AlreadyCompleted(
                f"this run has completed at step {run.progress.step}, and the loop trains on: a "
                "loop over healer.batches, healer.epochs or healer.steps ends at once. To train "
                "further, pass resume=True; for a new run, pass an empty directory"
            )
        self.phase = LoopPhase.AFTER_STEP
        self.in_evaluation = False
        loaders = run.loaders
        loader = loaders.last_trained
        first = run.step_batches.count_dispatch(pending)
        if self._step_is_epoch:
            loaders.epoch_loop.next_epoch = run.progress.step
        if loader is not loaders.last_trained:
            run.record.monitor.loader_start = first.index
        run.step_reader.push(pending, first)
        run.hang_guard.stepped(run.progress.step)
        run.saver.keep_random_states()

    def count_in_body(self) -> None:
        """Counts the step of a body that continues, as `queue_dispatch` does.

        The rest of the body may draw random numbers. So the random states are kept once more after
        it, for a save at a later end of the run.
        """
        self.queue_dispatch()
        self._counted_in_body = True

    def _roll_back_at_end(self, loader: RunLoader | None = None) -> bool:
        """Rolls back at the end of the data if the last steps require it.

        Without this, the final weights would keep the damage of the last steps, because no later
        step shows it. If the run is known to have more epochs, their steps show it, so a suspicion
        waits for them. Weights that are not finite do not wait: the program may evaluate them.

        Args:
            loader: the loader that has ended, or None for a loop that reads its own batches.

        Returns:
            Whether the run was rolled back, so that the loop has to continue.
        """
        alone = self.run.ranks.world == 1
        of_training = loader in (None, self.run.loaders.last_trained)
        self.queue_dispatch()
        if not (alone or of_training) or (loader is not None and self._is_evaluation(loader)):
            return False  # one rank may evaluate alone, and reading steps is collective
        if self.read_and_act(every=True):
            return True
        nonfinite = self.run.nonfinite_state
        verdict = None
        if of_training and not self.run.loaders.epoch_loop.has_more_epochs:
            newest = self.run.progress.step - 1
            verdict = self.run.comparisons.suspicion.decide_at_end(newest)
        if verdict is not None and self._note_rollback(self.run.better_weights.carry_out(verdict)):
            return True
        return alone and self._note_rollback(nonfinite.roll_back_if_saved(at_end=of_training))

    # -- reading --------------------------------------------------------------------------------

    def read_and_act(self, *, every: bool = False) -> bool:
        """Reads the steps that are due, and carries out their orders.

        Args:
            every: whether to read all queued steps, which waits for the device. Otherwise the
                newest steps stay queued until their records have arrived.

        Returns:
            Whether the run was rolled back. The rollback undoes the steps after the order, so they
            are not read.
        """
        for result, order in self._process_due(every=every):
            if self._note_rollback(self.run.recovery.act(result, order)):
                return True
            if order is not None and order.action & Action.SAVE:
                self.run.saver.save(SaveReason.ORDERED)
        return False

    def _process_due(self, *, every: bool) -> Iterator[tuple[StepResult, Order | None]]:
        """Processes the steps that are due; yields each with its order, not yet carried out."""
        run = self.run
        while run.step_reader.has_due(every=every):
            run.hang_guard.watch()  # reading waits for the device
            try:
                result = run.step_reader.read_next()
            except HealcoreError as error:
                self.reading_error = error
                raise
            run.hang_guard.pause()
            order = run.recovery.process(result)
            run.end_requests.note_mark(result)
            yield result, order
        run.hang_guard.pause()

    def _note_rollback(self, done: RollbackRecord | None) -> bool:
        """What the loop does after a rollback. Returns whether there was one."""
        if done is not None:
            self.run.end_requests.on_rollback()
            self._explain_epochs()
        return done is not None

    def _explain_epochs(self) -> None:
        """Says that the program's own number of the epoch is wrong after a rollback, if it is."""
        loaders = self.run.loaders
        one_pass = self.run.pass_states.passes == 1 and not loaders.epoch_loop.names_epochs
        if loaders.epoch_loop.crossed is None or one_pass or self.has_trainer:
            return
        self.warn(
            f"batches of epoch {loaders.place.epoch} are repeated, but the program's own `epoch` "
            f"is still {loaders.epoch_loop.crossed}: write `for epoch in healer.epochs(n)`, which "
            "goes back too, or use healer.epoch"
        )

    def _skip_if_nonfinite(self) -> bool:
        """Skips the batch that brings back NaN or Inf. Returns whether the run was rolled back.

        Orders of the steps before come first.
        """
        nonfinite = self.run.nonfinite_state
        arrays = nonfinite.came_back()
        if not arrays:
            return False
        if self.read_and_act(every=True):
            return True
        return self._note_rollback(nonfinite.skip_last_batch(arrays))

    def _save_when_due(self) -> bool:
        """Saves if a save is due. Returns whether the run was rolled back instead."""
        if not self.run.schedule.due() or self.run.step_batches.within_batch:
            return False
        if self.run.loaders.epoch_loop.names_epochs:
            for each in self.run.loaders:
                ends = each.trains and each.in_loop and each.at_end
                if ends and each.next_id.index > 1:
                    return False  # a restart would run the code after the epoch without its batches
        # Unread steps may lead to an order, which a restart from this save would never see. Reading
        # them costs no extra time, because the save waits for the device anyway.
        if self.read_and_act(every=True):
            return True
        if not self.run.schedule.delayed:
            if self._note_rollback(self.run.nonfinite_state.roll_back_if_saved()):
                return True
            self.run.saver.save(SaveReason.REGULAR)
        return False

    # -- the end, see `shutdown` ----------------------------------------------------------------

    def count_last_step(self) -> bool:
        """Counts the last step of a loop that was left. False if an update was interrupted."""
        if self.run.driver.is_interrupted():
            return False
        self.queue_dispatch()
        return True

    def keep_last_steps(self) -> bool:
        """Reads the unread steps at the end of a run, and leaves them for the next start.

        The last checkpoint holds them, so the next start acts on them where this run would have.

        Returns:
            Whether none of them has an alarm, as the ledger counts alarms.
        """
        self.queue_dispatch()
        self.log_warnings()
        self.run.hang_guard.watch()
        try:
            unread = self.run.step_reader.read_ahead()
        except HealcoreError as error:
            self.reading_error = error
            raise
        finally:
            self.run.hang_guard.pause()
        for each in unread:
            for records in each.dispatch.steps:
                if self.run.monitor.has_alarm(records):
                    return False
        return True

    def report_last_steps(self) -> None:
        """Reads the unread steps at the end of a run, and only reports their orders.

        The program has left its loop, so an order to roll back cannot be carried out any more.
        """
        self.queue_dispatch()
        self.log_warnings()
        for result, order in self._process_due(every=True):
            if order is not None:
                what = ", ".join(names_of(Action(order.action)))
                problem = f"{what} was ordered by the last steps of the run and not carried out"
                self.run.log.problem(result.index, problem)

    def warn(self, problem: str) -> None:
        """Reports a problem of the current step, as an event and a line of the log.

        Args:
            problem: what is wrong, and what to write instead.
        """
        self.run.log.problem(self.run.progress.step, problem)

    def log_warnings(self) -> None:
        """Reports the driver's warnings and the failures of trackers."""
        self.run.log.report_trackers(self.run.progress.step)
        while self.run.driver.warnings:
            self.warn(self.run.driver.warnings.pop(0))
