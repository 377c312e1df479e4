"""`Loop`: what happens between two steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from healcore.console import first_of, passes_power_of_ten
from healcore.core.decision import Action, names
from healcore.runtime.data.loader_registry import RunLoader
from healcore.runtime.data.scan_blocks import ScanBlocks
from healcore.runtime.driver import WEIGHTS
from healcore.runtime.run.ending.exits import AlreadyCompleted, IncompleteRun
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.run_record import StructureChange
from healcore.runtime.run.steps import StepResult

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_MAX_WITHOUT_STEP = 100
"""Batches without a step after which a run may end. Fewer may be a gradient accumulation."""

MAX_CHANGES = 100
"""Changes of the structure of the model to remember: a cloud of Gaussians changes it often."""
_MAX_ITERATIONS = 1000
"""Iterations of `steps` without a step that end a run that trains: more than any gradient
accumulation."""


class Loop:
    """The work between two steps, for every kind of loop. Not thread-safe.

    With `has_trainer` a trainer owns the loop, so that an early end is not a `break`.
    """

    def __init__(self, run: Run, *, has_trainer: bool) -> None:
        self.run = run
        self.was_used = False
        """Whether the program has called `batches`, `after_step` or `update`."""
        self.is_complete = False
        """Whether an earlier process has completed the run, so that this one trains nothing."""
        self.reached_end = False
        """Whether `epochs` or `steps` has come to its end."""
        self.in_body = False
        """Whether the body of a loop of the program runs, or was left before its end."""
        self.has_trainer = has_trainer
        self.after_update = False
        """Whether a trainer has stepped, and still has to evaluate, log or save after the step."""
        self.is_trial = False
        """Whether a trainer begins again with a smaller batch if memory runs out. The run then ends
        without a trace: it has taken no step."""
        self.own_count_error = ""
        """Error of a loop that counts steps itself, after a snapshot was replaced, or ""."""
        self._loop_begun = False  # whether a loop has begun since the start
        self._update_rolled_back = False
        """Whether an `update` since the last `after_step` has rolled back."""
        self._yielded_step = math.inf
        """Number of the step whose body of a loop over `steps` runs, or Inf outside of a body."""
        self._has_stepped = False  # since the last `_between_steps`
        self._waiting_weights = ""
        """Digest of the weights in the middle of a long wait of `steps` for a step."""
        self._step_is_epoch = False  # in `epochs`
        self._changes = 0  # of the structure of the model, in this process

    def on_step(self) -> None:
        """Called by the driver after each optimizer step."""
        self.run.guard.on_step()
        self.run.saver.keep_weight_sample()

    def begin(self) -> None:
        """Begins or continues a loop that has data of its own and knows the number of the step."""
        self.own_count_error = ""
        if not self._loop_begun:
            self._loop_begun = True
            self.run.data.restore_generators()

    def epochs(self, total: int) -> Iterator[int]:
        """See `Healer.epochs`. If the first epoch is one step without `batches`, counts steps."""
        loaders = self.run.loaders
        self.own_count_error = ""
        if self.is_complete:
            loaders.pass_over_completed()
            self.reached_end = True
            return
        epoch = loaders.next_epoch
        try:
            while epoch < total:
                self.run.data.begin_pass()
                # If the code after the step of epoch 0 raises, the checkpoint has step 1, epoch 0.
                counted = loaders.is_empty and (epoch > 0 or self.run.data.resumed_here)
                if counted and self.run.data.step + self.run.driver.pending_steps() == max(
                    epoch, 1
                ):
                    self._step_is_epoch = True
                    for number in self.steps(total):
                        loaders.next_epoch = number
                        yield number
                    return
                loaders.begin_epoch(epoch)
                self.in_body = True
                yield epoch
                self.in_body = False
                if loaders.returns_to is None:
                    epoch = loaders.next_epoch = epoch + 1
                    self.run.saver.keep_random_states()
                    self.run.saver.keep_weight_sample()
                else:
                    epoch = self._return_to_epoch()
            self.reached_end = True
        finally:
            loaders.can_return = False

    def _return_to_epoch(self) -> int:
        """Continues a loop over `epochs` at the epoch of a rollback, and returns the epoch.

        The program's code after the pass has run with the restored state (an evaluation, the step
        of a scheduler), so the state is restored once more.
        """
        self.run.restorer.restore_again(self.run.data.step)
        epoch = self.run.loaders.return_to_epoch()
        self.run.log.info(f"step {self.run.data.step}: healer.epochs yields epoch {epoch} again")
        return epoch

    @property
    def returns_to_epoch(self) -> bool:
        """Whether the rest of this epoch is dropped, because the run was rolled back before it."""
        return self.run.loaders.returns_to is not None

    def steps(self, total: int, warmup: int | None = None) -> Iterator[int]:
        """See `Healer.steps`."""
        without_step = 0
        last = begun_at = -1
        allowed = max(_MAX_ITERATIONS, total) if warmup is None else warmup
        self._loop_begun = False
        self.run.recovery.counts_steps = True
        if self.is_complete:
            self.run.loaders.pass_over_completed()
            self.reached_end = True
            return
        while True:
            rolled_back = self.after_step()
            without_step = without_step + 1 if self.run.data.step == last and not rolled_back else 0
            last = self.run.data.step
            begun_at = last if begun_at < 0 else begun_at
            if last != begun_at or rolled_back:
                allowed = _MAX_ITERATIONS  # the warm-up is over
            self._check_without_step(without_step, allowed)
            if self.run.data.step < total:
                self._yielded_step = self.run.data.step
                self.in_body = True
                yield self.run.data.step
                self.in_body = False
                self._yielded_step = math.inf
            elif not self.after_step(last=True):
                self.reached_end = True
                return

    def _check_without_step(self, iterations: int, allowed: int) -> None:
        """Raises IncompleteRun if a loop over `steps` trains nothing that the Healer sees.

        A loop may fill a replay buffer before its first step, so `allowed` is higher then. Without
        a limit, a program that never steps would run for ever: its number does not grow.
        """
        if (
            iterations in (_MAX_ITERATIONS // 2, _MAX_ITERATIONS)
            and self.run.driver.state_is_in_place
        ):
            before, self._waiting_weights = (
                self._waiting_weights,
                self.run.driver.settings()[WEIGHTS],
            )
            if iterations == _MAX_ITERATIONS and before != self._waiting_weights:
                raise IncompleteRun(
                    f"healcore: the weights change, and the Healer has seen no step in "
                    f"{iterations} iterations of healer.steps: the state needs the optimizer whose "
                    "step() the loop calls"
                )
        if iterations > allowed:
            raise IncompleteRun(
                f"healcore: step {self.run.data.step} was not taken in {allowed} iterations of "
                "healer.steps: for a longer warm-up write healer.steps(n, warmup=iterations), and "
                "a loop with fewer steps calls healer.after_step()"
            )
        if iterations == _MAX_ITERATIONS + 1:
            self.run.log.info(
                f"step {self.run.data.step}: {_MAX_ITERATIONS} iterations without an optimizer "
                f"step, as in a warm-up; after {allowed} of them the run ends with an error"
            )

    def batches(self, loader: Any, *args: Any) -> Iterator[Any]:
        """See `Healer.batches`; `args` as for `RunBatches.begin`."""
        data, guard = self.run.data, self.run.guard
        self.queue_dispatch()
        known = self.run.loaders.find(loader)
        if self.returns_to_epoch and (known is None or known.trains):
            return
        epoch = args[1] if len(args) > 1 else None
        if self.is_complete and self.run.loaders.is_of_completed_run(loader, epoch):
            return
        acts = not self._is_evaluation(known)
        begun = data.begin(loader, *args)
        self._loop_begun = True
        if known is not None and known.trains:  # what the code before this pass has changed
            self.run.saver.keep_weight_sample()
        if acts:  # after a `break` the loop continues from `begun`
            self.after_step()
        counted = False
        while True:
            if self.returns_to_epoch and begun.trains:
                guard.pause()
                begun.leave_loop()
                return
            try:
                guard.watch()
                batch = data.next(begun, directly_after_step=counted)
            except StopIteration:
                guard.pause()
                if not self._roll_back_at_end(begun):
                    break
                counted = False
                continue
            finally:
                data.log_skipped(begun)
            guard.watch()
            in_outer_body, self.in_body = self.in_body, True
            try:
                yield batch
                self.in_body = in_outer_body
            except GeneratorExit:  # the loop was left by `break`
                guard.pause()
                begun.leave_by_break()
                if self.run.data.step > self._yielded_step and not begun.trains:
                    begun.pending_ids = []  # an evaluation: no step uses its batches
                raise
            finally:
                begun.end_use()
            steps = data.step
            self.queue_dispatch()
            counted = data.step > steps
            if not self._is_evaluation(begun):
                self.after_step()
        data.end(begun, evaluates=self._is_evaluation(begun))

    def scan(self, blocks: ScanBlocks, dispatch: Callable[[int, int, int], None]) -> None:
        """See `Healer.scan`.

        Args:
            blocks: the blocks of updates, which are the batches of this loop.
            dispatch: dispatches a block. It takes the number of the block's first update, the
                number of updates in the block, and the number of updates in the next block, or 0.
        """
        loaders = self.run.loaders
        epoch = loaders.next_epoch if loaders.can_return else None
        for _ in self.batches(blocks, 1, epoch):
            dispatch(blocks.first, blocks.count, blocks.next_count)
        self.reached_end = True

    def _is_evaluation(self, loader: RunLoader | None) -> bool:
        """Whether an evaluation in the body of a training loop reads this loader.

        A restart does not repeat the rest of the body, so the work between two steps waits for it.
        """
        if loader is not None and loader.trains:
            return False
        in_use = any(each.in_use and each.trains for each in self.run.loaders)
        return in_use or self.run.data.step > self._yielded_step

    def after_step(self, *, last: bool = False) -> bool:
        """See `Healer.after_step`."""
        rolled_back = self._between_steps(last=last) or self._update_rolled_back
        self._update_rolled_back = False
        return rolled_back

    def update(self, take_state: Callable[[], None]) -> None:
        """See `Healer.update`. At the last batch, a rollback is part of the returned state."""
        if self.own_count_error:
            raise IncompleteRun(f"healcore: {self.own_count_error}")
        take_state()
        loader = self.run.loaders.last_trained
        rolled_back = self._between_steps()
        if not rolled_back and loader is not None and loader.in_use and loader.at_end:
            rolled_back = self._roll_back_at_end(loader)
        self._update_rolled_back |= rolled_back

    def _between_steps(self, *, last: bool = False) -> bool:
        """The work between two steps. Returns whether the run was rolled back."""
        run, data = self.run, self.run.data
        run.guard.pause()
        self.was_used = True
        self.queue_dispatch()
        if self.own_count_error or not self._loop_begun:
            self.begin()
        has_stepped, self._has_stepped = self._has_stepped, False
        if has_stepped:  # what the rest of the body has changed belongs to the step
            run.saver.keep_weight_sample()
        self.after_update = False
        if last:
            return self._roll_back_at_end()
        if has_stepped:
            self._note_structure()
            if self.read_and_act() or self._save_when_due():
                return True
            if run.holding.withholding_changes(data.step):
                if self.read_and_act(all=True):
                    return True
                run.holding.before_step(data.step)
            run.end_requests.vote_when_due(data.step, run.log)
            run.saver.poll()
        self.log_warnings()
        # Within an accumulation the state cannot be saved, so the run ends after the accumulation.
        unread = len(data.pending_ids)
        unseen = False
        may_end = data.between_steps or unread >= _MAX_WITHOUT_STEP
        trains = data.last_read is not None and (data.last_read.trains or not data.step)
        if unread == _MAX_WITHOUT_STEP and not data.step:  # another optimizer trains
            unseen = run.driver.settings()[WEIGHTS] != run.record.settings.get(WEIGHTS)
        if trains and (unseen or unread == _MAX_ITERATIONS):
            why = "the state needs the optimizer whose step() the loop calls"
            self.warn(f"{unread} batches without a step that the Healer sees: {why}")
        run.end_requests.raise_if_asked(may_end=may_end)
        return False

    def _note_structure(self) -> None:
        """Asks for a checkpoint soon after the program has changed the structure of its model."""
        changes = self.run.driver.structure_changes()
        if not changes:
            return
        step, place = self.run.data.step, self.run.loaders.place
        self.run.record.changes.append(StructureChange(max(step - 1, 0), place.epoch))
        del self.run.record.changes[:-MAX_CHANGES]
        self.run.record.param_groups = self.run.driver.param_groups()
        self.run.loaders.changed_in = place.epoch
        self.run.comparisons.on_structure_change()
        self.run.schedule.after_change = True
        self.run.log.event("data", step=step, outcome=f"the model has changed: {first_of(changes)}")
        self._changes += 1
        if passes_power_of_ten(self._changes - 1, self._changes):
            again = f" ({self._changes} times so far)" if self._changes > 1 else ""
            self.run.log.info(
                f"step {step}: the program has changed the structure of its model{again}: "
                f"{first_of(changes)}. A checkpoint follows, because earlier ones do not fit it"
            )

    def queue_dispatch(self) -> None:
        """Counts and queues the dispatch since the last call. The next `_between_steps` acts."""
        run = self.run
        pending = run.driver.take_dispatch()
        if pending is None:
            return
        if self.is_complete:
            raise AlreadyCompleted(
                f"this run has completed at step {self.run.data.step}, and the loop trains on: a "
                "loop over healer.batches, healer.epochs or healer.steps ends at once. To train "
                "further, pass resume=True; for a new run, pass an empty directory"
            )
        self._has_stepped = True
        self.after_update = self.has_trainer
        loaders = run.loaders
        loader = loaders.last_trained
        first = run.data.count_dispatch(pending)
        if self._step_is_epoch:
            loaders.next_epoch = run.data.step
        if loader is not loaders.last_trained:
            run.record.monitor.loader_start = first.index
        run.reader.push(pending, first)
        run.guard.stepped(run.data.step)
        run.saver.keep_random_states()

    def _roll_back_at_end(self, loader: RunLoader | None = None) -> bool:
        """Rolls back at the end of the data if the last steps require it. True if it did."""
        alone = self.run.ranks.world == 1
        of_training = loader in (None, self.run.loaders.last_trained)
        self.queue_dispatch()
        if not (alone or of_training) or (loader is not None and self._is_evaluation(loader)):
            return False  # one rank may evaluate alone, and reading steps is collective
        if self.read_and_act(all=True):
            return True
        nonfinite = self.run.nonfinite
        verdict = self.run.comparisons.decide_at_end(self.run.data.step) if of_training else None
        if verdict is not None and self._note_rollback(self.run.better_weights.carry_out(verdict)):
            return True
        return alone and self._note_rollback(nonfinite.roll_back_if_saved(at_end=of_training))

    # -- reading --------------------------------------------------------------------------------

    def read_and_act(self, *, all: bool = False) -> bool:
        """Reads the steps that are due and carries out orders. Returns whether it rolled back."""
        for step, order in self._process_due(all=all):
            if self._note_rollback(self.run.recovery.act(step, order)):
                return True
            if order is not None and order.action & Action.SAVE:
                self.run.saver.save("ordered")
        return False

    def _process_due(self, *, all: bool) -> Iterator[tuple[StepResult, Order | None]]:
        """Processes the steps that are due; yields each with its order, not yet carried out."""
        run = self.run
        while run.reader.has_due(all=all):
            run.guard.watch()  # reading waits for the device
            step = run.reader.read_next()
            run.guard.pause()
            order = run.recovery.process(step)
            run.end_requests.note_mark(step)
            yield step, order
        run.guard.pause()

    def _note_rollback(self, done: RollbackRecord | None) -> bool:
        """What the loop does after a rollback. Returns whether there was one."""
        if done is not None:
            self.run.end_requests.on_rollback()
            self._explain_epochs()
        return done is not None

    def _explain_epochs(self) -> None:
        """Says that the program's own number of the epoch is wrong after a rollback, if it is."""
        loaders = self.run.loaders
        one_pass = self.run.data.passes == 1 and not loaders.names_epochs
        if loaders.crossed is None or one_pass or self.has_trainer:
            return
        self.warn(
            f"batches of epoch {loaders.place.epoch} are repeated, but the program's own `epoch` "
            f"is still {loaders.crossed}: write `for epoch in healer.epochs(n)`, which goes back "
            "too, or use healer.epoch"
        )

    def _save_when_due(self) -> bool:
        """Saves if a save is due. Returns whether the run was rolled back instead."""
        if not self.run.schedule.due() or self.run.data.within_batch:
            return False
        training = [each for each in self.run.loaders if each.trains and each.in_loop]
        ends = any(each.at_end and each.next_id.index > 1 for each in training)
        if ends and self.run.loaders.names_epochs:
            return False  # a restart would run the code after the epoch without its batches
        # Unread steps may lead to an order, which a restart from this save would never see. Reading
        # them costs no extra time, because the save waits for the device anyway.
        if self.read_and_act(all=True):
            return True
        if not self.run.schedule.delayed:
            if self._note_rollback(self.run.nonfinite.roll_back_if_saved()):
                return True
            self.run.saver.save("regular")
        return False

    # -- the end, see `shutdown` ----------------------------------------------------------------

    def count_last_step(self) -> bool:
        """Counts the last step of a loop that was left. False if an update was interrupted."""
        if self.run.driver.is_interrupted():
            return False
        self.queue_dispatch()
        return True

    def report_last_steps(self) -> None:
        """Reads the unread steps at the end of a run, and only reports their orders."""
        self.queue_dispatch()
        self.log_warnings()
        for step, order in self._process_due(all=True):
            if order is not None:
                what = ", ".join(names(Action(order.action)))
                problem = f"{what} was ordered by the last steps of the run and not carried out"
                self.run.log.problem(step.index, problem)

    @property
    def left_early(self) -> bool:
        """Whether the program has left its loop in the body, before the last batch or step."""
        loader = self.run.loaders.last_trained
        if loader is not None and loader.in_loop and loader.at_end:
            return False
        return self.in_body

    @property
    def break_place(self) -> str:
        """Place at which a `break` has left the loop before its last epoch ended, or ""."""
        loader = self.run.loaders.last_trained
        if self.has_trainer or loader is None or not loader.in_loop:
            return ""
        return loader.break_place

    def warn(self, problem: str) -> None:
        """Reports a problem of the current step."""
        self.run.log.problem(self.run.data.step, problem)

    def log_warnings(self) -> None:
        """Reports the driver's warnings and the failures of trackers."""
        self.run.log.report_trackers(self.run.data.step)
        while self.run.driver.warnings:
            self.warn(self.run.driver.warnings.pop(0))
