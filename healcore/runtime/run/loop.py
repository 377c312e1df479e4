"""`Loop`: what happens between two steps of a run, for every kind of training loop.

A program hands its loop over to the Healer, or calls the Healer in a loop of its own:

    batches, scan         `batches/batch_loop.py`     call `Loop.after_step`
    epochs, steps         `batches/number_loops.py`   call `Loop.after_step`
    after_step, update                                are `Loop.after_step` and `Loop.update`

Trainers do the same through `TrainerAccess`. All of these calls end in `Loop._between_steps`, which
has the order of the work:

    the program's step            Loop                                   phase
    ------------------            ----                                   -----
    batch is read, loss,                                                 BEFORE_STEP
    optimizer.step()
                                  queue_dispatch: counts the step,       AFTER_STEP
                                  queues its records for the host
    rest of the body
                                  _between_steps: reads the records      BEFORE_STEP
                                  of an earlier step, compares
                                  weights, rolls back or saves,
                                  freezes, votes, ends

The host reads a record a fixed number of steps later, so that it does not wait for the device (see
`dispatch_queue.LAG`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from healcore import console
from healcore.console import first_of, is_power_of_ten
from healcore.core.decision import Action, names_of
from healcore.core.errors import HealcoreError
from healcore.runtime.data.sources import SourceCursor
from healcore.runtime.driver import HealerError, check_framework
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.dispatch_queue import StepResult
from healcore.runtime.run.ending.completeness import stop_if_not_trained
from healcore.runtime.run.ending.exits import AlreadyCompleted
from healcore.runtime.run.progress import COUNTED, LoopPhase
from healcore.runtime.run.run_record import MAX_CHANGES, StructureChange
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from healcore.runtime.run.witness.loss_function import loss_of

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

MAX_UNSEEN_STEPS = 20
"""Steps without a call of the Healer after which a line says what follows from that."""
MAX_WITHOUT_STEP = 100
"""Batches without a step after which a run may end. Fewer may be a gradient accumulation."""
MAX_ITERATIONS = 1000
"""Iterations of a loop without a step after which a run that trains ends with an error. No gradient
accumulation is as long."""


class Loop:
    """The work between two steps, for every kind of loop. It is not thread-safe.

    Args:
        run: the parts of the run.

    Attributes:
        state: where the program is in its loop.
        has_trainer: whether a trainer (Lightning, Hugging Face) owns the loop, so that an early end
            is not a `break`.
        unseen_steps: number of optimizer steps before the program has first called the Healer, or
            None once it has. A loop that never calls it ends with an error, because nothing could
            be saved or rolled back between its steps.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self.state = run.progress
        self.has_trainer = run.progress.has_trainer
        self.unseen_steps: int | None = 0
        self._changes = 0
        """Number of changes of the model's structure in this process."""
        self._rolled_back_by_update: RollbackRecord | None = None
        """The newest rollback by an `update` since the last `after_step`, or None without one."""

    def on_step(self) -> None:
        """Called by the driver after each optimizer step, within the body of the loop."""
        self.run.hang_guard.pause()
        if self.unseen_steps is not None:
            self.unseen_steps += 1
            if self.unseen_steps == MAX_UNSEEN_STEPS:
                console.warning(_UNSEEN_STEPS)
        self.run.saver.keep_weight_sample()

    # -- the loops of the program ---------------------------------------------------------------

    def next_step(self) -> int:
        """The number of the next step; see `Healer.step`.

        Restores the random states of a checkpoint, once for a loop that reads its own batches. Such
        a loop calls nothing else of the Healer before it draws its first batch. If the states were
        set at the start of the run, the set-up of the program would draw from them.
        """
        if not self.run.data_state.is_restored:
            self.run.data_state.restore()
        return self.state.step + bool(self.run.driver.pending_steps())

    def loss(self, batch: Any, optimizer: str | None) -> Any:
        """Calls `loss_fn` on a batch, and observes the loss; see `Healer.loss`."""
        check_framework(self.run.driver, "torch", "healer.loss(batch)")
        if self.run.loss_fn is None:
            raise HealerError(
                "healer.loss(batch) needs a loss_fn, and this Healer has none: pass Healer(..., "
                "loss_fn=lambda batch: loss_fn(model, batch)), or call healer.observe(loss)"
            )
        result = self.run.loss_fn(batch)
        self.observe(loss_of(result), optimizer, batch=batch)
        return result

    def observe(
        self, loss: Any, optimizer: str | None, *, batch: Any = None, eval_loss: Any = None
    ) -> None:
        """Gives a loss of the program to the driver; see `Healer.observe`."""
        run = self.run
        if eval_loss is not None:
            run.driver.observe_eval(eval_loss, optimizer)
            run.metrics.eval_loss = float(eval_loss)
        if loss is None:
            return
        check_framework(run.driver, "torch", "healer.observe(loss)")
        part, weight = run.out_of_memory.part, 1.0
        if part is not None:
            weight = part.weight
        if batch is not None:
            run.step_batches.add_observed(batch, weight)
        run.hang_guard.resume()  # a hang between the loss and the optimizer's step counts
        run.driver.observe(loss, optimizer, weight=weight)

    @property
    def returns_to_epoch(self) -> bool:
        """Whether the rest of this epoch is dropped, because the run was rolled back before it."""
        return self.run.loaders.epoch_loop.returns_to is not None

    def is_evaluation(self, loader: SourceCursor) -> bool:
        """Whether an evaluation in the body of a training loop reads this loader."""
        if loader.trains:
            return False
        for each in self.run.loaders:
            if each.in_use and each.trains:
                return True
        return self.state.has_taken_yielded_step

    def work_waits(self, loader: SourceCursor) -> bool:
        """Whether the work between two steps waits while the program reads this loader.

        It waits for the end of an evaluation in the body of a training loop, because a restart does
        not repeat the rest of the body. After a restart it also waits until the training data have
        their place again: a save would not have the place, and a rollback would not move it.
        """
        if not self.run.progress.steps_taken and self.run.loaders.awaits_training_data:
            return True
        return self.is_evaluation(loader)

    # -- the work between two steps -------------------------------------------------------------

    def after_step(self, *, last: bool = False, counted: bool = False) -> RollbackRecord | None:
        """Does the work between two steps.

        Args:
            last: whether the loop ends after this step unless the run is rolled back. All pending
                steps are read, and nothing is saved.
            counted: whether the caller has counted the step (`queue_dispatch`).

        Returns:
            The rollback, here or in an `update` since the last call, or None without one.
        """
        if not counted:
            self.queue_dispatch()
        rollback = self._between_steps(last=last) or self._rolled_back_by_update
        self._rolled_back_by_update = None
        if last and rollback is None:
            self.state.reached_end = True
            self.judge_at_end()
        return rollback

    def update(self, state: Any, batch: Any) -> Any:
        """Takes the state of a step in JAX, and does the work between two steps.

        At the last batch it also does the work at the end of the data: the program takes the state
        from `update`, so a later rollback would not reach it. See `Healer.update`.
        """
        run = self.run
        check_framework(run.driver, "JAX", "healer.update(state)")
        if batch is not None:
            run.step_batches.add_observed(batch, 1.0)
        run.driver.update(state)
        self.queue_dispatch()
        loader = run.loaders.last_trained
        rollback = self._between_steps()
        if rollback is None and loader is not None and loader.in_use and loader.at_end:
            rollback = self.roll_back_at_end(loader)
        if rollback is not None:
            self._rolled_back_by_update = rollback
        return run.driver.live

    def _between_steps(self, *, last: bool = False) -> RollbackRecord | None:
        """Does the work between two steps.

        The order of the work is part of the decision:

        1. The caller has counted the step and queued its records (`queue_dispatch`).
        2. The records of earlier steps are read. For each of these steps, weights are compared if
           there is a reason, and then an order or a verdict is carried out: a rollback, a stop or a
           save (`read_and_act`, `Recovery.act`).
        3. A batch that brings back NaN or Inf is skipped (`_skip_if_nonfinite`).
        4. If a save is due, a checkpoint is saved. If an earlier save has NaN or Inf, the run rolls
           back instead (`_save_when_due`).
        5. Frozen steps begin or end (`Holding.hold`).
        6. The ranks vote on the end of the run if a vote is due (`EndRequests.vote_when_due`).
        7. The run ends, or its rank proposes the end, if a signal, Ctrl-C or the stop file has
           asked for the end (`EndRequests.raise_or_propose`).

        Only 1 and 7 are done without an optimizer step since the last call. Before a save, and
        before a change of the frozen steps, all queued steps are read. With `last`, only 1 and 3
        are done, and then the work at the end of the data (`roll_back_at_end`).

        Args:
            last: as for `after_step`.

        Returns:
            The rollback, or None without one. After a rollback the rest of the work waits for the
            next step.
        """
        run, state = self.run, self.state
        run.hang_guard.pause()
        self.unseen_steps = None
        if not run.data_state.is_restored:
            run.data_state.restore()
        has_stepped = state.phase in COUNTED
        if has_stepped:  # what the rest of the body has changed belongs to the step
            run.saver.keep_weight_sample()
            if state.phase is not LoopPhase.AFTER_STEP:
                run.saver.keep_random_states()
        state.end_step()
        if last:
            if has_stepped:
                rollback = self._skip_if_nonfinite()
            else:
                rollback = None
            return rollback or self.roll_back_at_end()
        if has_stepped:
            changes = run.driver.structure_changes()
            if changes:
                self._note_structure(changes)
            rollback = self.read_and_act() or self._skip_if_nonfinite() or self._save_when_due()
            rollback = rollback or self._begin_or_end_freeze()
            if rollback is not None:
                return rollback
            run.end_requests.vote_when_due(run.progress.step, run.log)
            run.saver.poll()
        if run.driver.warnings:
            self.log_warnings()
        waiting = len(run.step_batches.pending_ids)
        if waiting in (MAX_WITHOUT_STEP, MAX_ITERATIONS):
            self._warn_of_unseen_steps(waiting)
        # Within an accumulation the state cannot be saved, so the run ends after the accumulation.
        may_end = waiting >= MAX_WITHOUT_STEP
        if not waiting:
            may_end = not run.step_batches.within_batch
        run.end_requests.raise_or_propose(may_end=may_end)
        return None

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
        if self.state.phase is LoopPhase.COMPLETED:
            raise AlreadyCompleted(
                f"this run has completed at step {run.progress.step}, and the loop trains on: a "
                "loop over healer.batches, healer.epochs or healer.steps ends at once. To train "
                "further, pass resume=True; for a new run, pass an empty directory"
            )
        loaders = run.loaders
        loader = loaders.last_trained
        first = run.step_batches.count_dispatch(pending)
        run.data_state.of_checkpoint = None  # random numbers continue from this step
        if self.state.step_is_epoch:
            loaders.epoch_loop.next_epoch = run.progress.step
        if loader is not loaders.last_trained:
            run.journal.loader_start = first.index
        run.dispatch_queue.push(pending, first)
        run.hang_guard.step = run.progress.step
        run.saver.keep_random_states()

    def count_in_body(self) -> None:
        """Counts the step of a body that continues, as `queue_dispatch` does.

        The rest of the body may draw random numbers. So the random states are kept once more after
        it, for a save at a later end of the run.
        """
        self.queue_dispatch()
        if self.state.phase is LoopPhase.AFTER_STEP:
            self.state.phase = LoopPhase.REST_OF_BODY

    def _skip_if_nonfinite(self) -> RollbackRecord | None:
        """Skips the batch that brings back NaN or Inf, by a rollback to before its step.

        Returns:
            The rollback, or None without one. Orders of the steps before come first, so it may be
            the rollback of such an order.
        """
        nonfinite = self.run.nonfinite_recovery
        trouble = nonfinite.batch_of_nonfinite_state()
        if trouble is None:
            return None
        rollback = self.read_and_act(every=True)
        if rollback is not None:
            return rollback
        return self.run.recovery.go_back(trouble, trouble.found_at)

    def _begin_or_end_freeze(self) -> RollbackRecord | None:
        """Freezes the steps from now on, or ends it, as the envelope says. May roll back before."""
        run = self.run
        if run.record.envelope.freezes(run.progress.step) == run.holding.freezes:
            return None
        rollback = self.read_and_act(every=True)
        if rollback is None:
            run.holding.hold(run.record.envelope, run.progress.step)
        return rollback

    def _save_when_due(self) -> RollbackRecord | None:
        """Saves if a save is due. Returns the rollback that was made instead, or None."""
        if not self.run.schedule.due() or self.run.step_batches.within_batch:
            return None
        if self.run.loaders.epoch_loop.names_epochs:
            for each in self.run.loaders:
                ends = each.trains and each.in_loop and each.at_end
                if ends and each.next_id.index > 1:
                    return None  # a restart would run the code after the epoch without its batches
        # A restart from this save would never see the orders of steps that are not read. Reading
        # costs no extra time, because the save waits for the device anyway.
        rollback = self.read_and_act(every=True)
        if rollback is not None or self.run.schedule.delayed:
            return rollback
        rollback = self.run.nonfinite_recovery.roll_back_if_saved()
        if rollback is None:
            self.run.saver.save(SaveReason.REGULAR)
        return rollback

    # -- calls of the program between two steps -------------------------------------------------

    def expect_change(self) -> None:
        """Prepares for a change that the program announces; see `Healer.expect_change`."""
        self.run.driver.expect_change()
        self.run.saver.keep_weight_sample()
        self.run.witness.pause_until(self.run.progress.step + 1)

    def save(self) -> None:
        """Saves a checkpoint because the program asks for it; see `Healer.save`."""
        self.count_in_body()
        if not self.returns_to_epoch:
            self.run.saver.save(SaveReason.REQUESTED)
            self.run.saver.keep_weight_sample()

    # -- the end of the data --------------------------------------------------------------------

    def roll_back_at_end(self, loader: SourceCursor | None = None) -> RollbackRecord | None:
        """Rolls back at the end of the data if the last steps require it.

        Without this, the final weights would keep the damage of the last steps, because no later
        step shows it. If the run is known to have more epochs, their steps show it, so a suspicion
        waits for them. Weights that are not finite do not wait: the program may evaluate them.

        Args:
            loader: the loader that has ended, or None for a loop that reads its own batches.

        Returns:
            The rollback, after which the loop has to continue, or None without one.
        """
        alone = self.run.ranks.world == 1
        of_training = loader in (None, self.run.loaders.last_trained)
        self.queue_dispatch()
        if not (alone or of_training) or (loader is not None and self.work_waits(loader)):
            return None  # one rank may evaluate alone, and reading steps is collective
        rollback = self.read_and_act(every=True)
        if rollback is not None:
            return rollback
        if of_training and not self.run.loaders.epoch_loop.has_more_epochs:
            newest, recovery = self.run.progress.step - 1, self.run.recovery
            verdict = self.run.witness.decide_at_end()
            if verdict is not None:
                rollback = recovery.go_back(verdict, newest)
            else:
                rollback = recovery.accept_intended(newest, at_end=True)
        if rollback is None and alone:
            rollback = self.run.nonfinite_recovery.roll_back_if_saved(at_end=of_training)
        return rollback

    def judge_at_end(self) -> None:
        """Stops a run that has not trained, before the code after its loop uses the weights.

        Ranks may end their loops at different steps, and the judgement is collective, so a run of
        several ranks is judged at the end of the block only.

        Raises:
            RunStopped: the run has not trained.
        """
        in_outer_loop = self.state.yielded_step is not None
        if self.state.is_complete or self.has_trainer or in_outer_loop or self.run.ranks.world > 1:
            return
        if self.run.progress.steps_taken:
            stop_if_not_trained(self.run)

    # -- reading records, and carrying out orders -----------------------------------------------

    def read_and_act(self, *, every: bool = False, saves: bool = False) -> RollbackRecord | None:
        """Reads the steps that are due, and carries out their orders.

        Args:
            every: whether to read all queued steps, which waits for the device. Otherwise the
                newest steps stay queued until their records have arrived.
            saves: whether an order asks for a save after these steps.

        Returns:
            The rollback, or None without one. It undoes the steps after the order, so they are not
            read.
        """
        queue = self.run.dispatch_queue
        while queue.noted or queue.has_due(every=every):
            result, order = self._next_due()
            rollback = self.run.recovery.act(result, order)
            if rollback is not None:
                return rollback
            if order is not None and order.action & Action.SAVE:
                return self.read_and_act(every=True, saves=True)
        if saves:
            self.run.saver.save(SaveReason.ORDERED)
        return None

    def note_steps(self) -> None:
        """Reads all queued steps before a save in the body of the loop, and notes their orders.

        The program's own code follows, so nothing can be rolled back here. The next work between
        two steps acts on the steps.
        """
        queue = self.run.dispatch_queue
        while queue.has_due(every=True):
            queue.noted.append(self._read_next())

    def _next_due(self) -> tuple[StepResult, Trouble | None]:
        """Takes the oldest step that was noted or is due, with its order."""
        if self.run.dispatch_queue.noted:
            return self.run.dispatch_queue.noted.popleft()
        return self._read_next()

    def _read_next(self) -> tuple[StepResult, Trouble | None]:
        """Reads the oldest queued step, and finds its order."""
        run = self.run
        run.hang_guard.watch()  # reading waits for the device
        try:
            result = run.dispatch_queue.read_next()
        except HealcoreError as error:
            run.progress.reading_error = error
            raise
        order = run.recovery.find_order(result)
        run.end_requests.note_mark(result)
        run.hang_guard.pause()
        return result, order

    # -- the end of the run, see `shutdown` -----------------------------------------------------

    def count_last_step(self) -> bool:
        """Counts the last step of a loop that was left. False if an update was interrupted."""
        if self.run.driver.is_interrupted():
            return False
        self.queue_dispatch()
        return True

    def report_last_steps(self) -> None:
        """Reads the unread steps at the end of a run, and only reports their orders.

        The program has left its loop, so an order to roll back cannot be carried out any more.
        """
        self.queue_dispatch()
        self.log_warnings()
        while self.run.dispatch_queue.noted or self.run.dispatch_queue.has_due(every=True):
            result, order = self._next_due()
            if order is not None:
                what = ", ".join(names_of(Action(order.action)))
                problem = f"{what} was ordered by the last steps of the run and not carried out"
                self.run.log.problem(result.index, problem)

    # -- what the program does ------------------------------------------------------------------

    def warn(self, problem: str) -> None:
        """Reports a problem of the current step, as an event and a line of the log.

        Args:
            problem: what is wrong, and what to write instead.
        """
        self.run.log.problem(self.run.progress.step, problem)

    def log_warnings(self) -> None:
        """Reports the warnings of the driver."""
        while self.run.driver.warnings:
            self.warn(self.run.driver.warnings.pop(0))

    def _warn_of_unseen_steps(self, waiting: int) -> None:
        """Warns a loop that reads batches and takes no step of an optimizer in the state.

        Such a program may train an optimizer that is not in the state, or its steps have no
        gradients.

        Args:
            waiting: number of batches since the last step: `MAX_WITHOUT_STEP` or `MAX_ITERATIONS`.
        """
        run, reason = self.run, self.run.driver.no_step_reason()
        loader = run.step_batches.last_read
        trains = loader is None or loader.trains or not run.progress.step
        if not reason and trains and waiting == MAX_ITERATIONS:
            reason = (
                f"{waiting} batches without a step that the Healer sees: the state needs the "
                "optimizer whose step() the loop calls"
            )
        if reason:
            self.warn(reason)

    def _note_structure(self, changes: list[str]) -> None:
        """Records that the program has added or removed parameters, and makes a checkpoint due.

        Earlier checkpoints and earlier weights in memory do not fit such a model. Without a record
        of the change, a rollback would try to restore them, and a restart would reject a model of
        another structure. A program may change its structure often, as in progressive growing, so
        lines in the log become rarer with the number of changes.
        """
        run = self.run
        step, epoch = run.progress.step, run.loaders.place.epoch
        changed = StructureChange(max(step - 1, 0), epoch)
        run.record.changes = [*run.record.changes, changed][-MAX_CHANGES:]
        run.loaders.epoch_loop.changed_in = epoch
        run.witness.on_structure_change()
        run.schedule.after_change = True
        self._changes += 1
        if is_power_of_ten(self._changes):
            run.log.note(
                step,
                f"the program has changed the structure of its model: {first_of(changes)}. "
                "A checkpoint follows, because earlier ones do not fit it",
            )


_UNSEEN_STEPS = (
    f"{MAX_UNSEEN_STEPS} steps, and neither healer.batches(loader) nor healer.after_step() was "
    "called. If none of these calls follows, the Healer cannot save, roll back or stop: the run "
    "cannot be resumed, and it ends with status 1. Write `for batch in healer.batches(loader)`, or "
    "healer.after_step() after each step"
)
