"""`RollbackRestore`: restores a checkpoint for a rollback.

    choose steps            the checkpoints to try, the best first
    load                    read and check the first intact one, put it into the live run
    limit                   learning rates, norms and numbers, as the order says
    rewind                  loaders, ledger, random states; the undone steps are forgotten
    commit                  replace the record of the checkpoint by one rename

All checks pass before live state changes. A process that is killed before the rename has changed
nothing on disk, and its successor finds the trouble again. After the rename every start resumes
from this checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeAlias

from healcore.runtime.data.rewind_obstacle import RewindObstacle
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.engine_states import engines_after_rollback, limit_norms, with_lr_states
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.orders import Order, OrderReason, RollbackRecord
from healcore.runtime.run.restore.stored import SavedCheckpoint
from healcore.runtime.run.restore.trials import trials_with
from healcore.runtime.run.rollback.dead_run import Revival, revivals_at
from healcore.runtime.run.rollback.next_trial import Trial
from healcore.runtime.run.rollback.rate_limits import RatesAfterRollback, limit_rates
from healcore.runtime.store.checkpoints import (
    CheckpointInfo,
    NoGoodCheckpoint,
    StateMismatch,
    StoreError,
    choose_checkpoints,
)
from healcore.runtime.store.ranks import run_on_first

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

LostSteps: TypeAlias = Callable[[int, RewindObstacle | None], int]
"""Step of the restored checkpoint, and why the data was not rewound or None -> number of undone
steps that the run does not repeat."""


def _none_lost(target: int, obstacle: RewindObstacle | None) -> int:
    """The `LostSteps` of a loop that repeats every step."""
    return 0


class RollbackRestore:
    """Restores a checkpoint for a rollback, in the order at the top of this file.

    It does not decide whether to roll back. An `Order` has the reason, the onset of the trouble and
    what changes. For an order this class chooses the checkpoint, and another one where the first
    cannot be read or no longer fits the model. It also decides whether the learning rates of the
    checkpoint count as healthy; `limit_rates` (`rollback/rate_limits.py`) then computes the rates
    that follow. The restore is collective: either every rank loads the same checkpoint, or no rank
    loads one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def restore(
        self, order: Order, lost_steps: LostSteps = _none_lost, lr_scale: float = 1.0
    ) -> RollbackRecord:
        """Restores a checkpoint for an order.

        Args:
            order: what to restore, and what to change.
            lost_steps: says how many undone steps the run does not repeat.
            lr_scale: the lowest learning-rate multiplier now, for the record.

        Returns:
            The rollback, as it is in the record of the restored checkpoint.

        Raises:
            NoGoodCheckpoint: no checkpoint is usable. A failed load may have changed a part of the
                live state.
            StateMismatch: the state differs in structure from every checkpoint.
            StoreError: the store cannot be read.
        """
        # Choose.
        saver = self.run.saver
        saver.wait()
        self.run.known_checkpoints.end_probation(before=order.onset)
        self.run.stored_checkpoints.find_damage()
        steps = self._choose(order)

        # Load.
        live, rates = self.run.driver.engines(), self.run.driver.learning_rates()
        order = order.with_changes(lr_at_fault=self._fault_rates(order, live, rates))
        engines, saved = self.run.stored_checkpoints.load_first_intact(
            steps, partial(self._load_target, order, live), self.run.progress.step
        )

        # Limit.
        after = self._limit_rates(order, saved, engines)

        # Rewind.
        self.run.record.trials = trials_with(self.run, order, live, saved)
        skip_more = self.run.policy.rollback.skip_batches
        if order.reason is OrderReason.BATCH:
            skip_more = 0
        obstacle = self.run.loaders.rewind(
            saved.position, order.batches, skip_more, order.changes.read_again
        )
        lost = lost_steps(saved.step, obstacle)
        done = self._record_of(order, saved.step, after, rates, lost, obstacle, lr_scale)
        saved_ledger = None if saved.record is None else saved.record.ledger
        self.run.ledger.on_rollback(done, saved_ledger)
        if saved.data_state is not None:  # after the loaders, which draw random numbers
            self.run.data_state.set_random_states(saved.data_state)
        self.run.holding.held = self._held_after(order)
        self._forget_undone_steps(saved.step)

        # Commit.
        saver.begin_attempt(saved.step)
        self._commit_rollback(done)
        return done

    def _choose(self, order: Order) -> tuple[int, ...]:
        """Steps of the checkpoints to try, the best first.

        A checkpoint from before the newest change of the model's structure does not fit. The first
        one after the change is an initial one: the run with the new structure begins with it.

        Raises:
            StateMismatch: all checkpoints that could be restored are from before the change.
            NoGoodCheckpoint: no checkpoint could be restored.
        """
        saves = self.run.stored_checkpoints.listed()
        changes = self.run.record.changes
        if not changes:
            return self._choose_among(saves, order)
        changed = changes[-1].step
        fitting = [each for each in saves if each.step > changed and each.is_usable]
        try:
            return self._choose_among(fitting, order, [each.step for each in fitting[:1]])
        except NoGoodCheckpoint:
            newest = self._choose_among(saves, order)[0]
            difference = f"the program has changed the structure of its model at step {changed}"
            advice = "No rollback crosses such a change"
            raise StateMismatch(newest, [difference], advice=advice) from None

    def _choose_among(
        self, saves: Sequence[CheckpointInfo], order: Order, initial: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """`choose_checkpoints` with the arguments for an order."""
        if order.anchor_step is not None:
            return choose_checkpoints(saves, onset=order.anchor_step, sound_until_onset=True)
        ledger = self.run.ledger
        past = ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        if order.reason is OrderReason.DEAD_RUN:
            past = revivals_at(order.onset, ledger.in_force)
        if order.reason is OrderReason.BATCH:
            past = []  # the steps since the last rollback have shown that its checkpoint is sound
        initial = [self.run.record.first_step, *initial]
        if self.run.known_checkpoints.started_from is not None:
            initial.append(self.run.known_checkpoints.started_from)
        return choose_checkpoints(
            saves,
            onset=order.onset,
            depth=order.depth,
            tried=[each.continues_at for each in past],
            initial=initial,
            sound_until_onset=order.sound_until_onset,
        )

    def _fault_rates(self, order: Order, live: Engines, rates: Rates) -> Mapping[str, float] | None:
        """`lr_at_fault` of the order, completed by the rates in force of the other optimizers."""
        at_fault = order.changes.lr_at_fault
        if at_fault is None:
            return None
        completed = {}
        for name, state in live.items():
            scale = float(self.run.policy.engine.from_dict(state).lr.scale)
            rate = rates.get(name)
            completed[name] = (1.0 if rate is None else rate) * scale
        return completed | {**at_fault}

    def _load_target(self, order: Order, live: Engines, saved: SavedCheckpoint) -> Engines:
        """Loads the target of a rollback. Returns the engine states that are loaded with it."""
        engines = engines_after_rollback(self.run.policy.engine, live, saved.engines)
        changes = order.changes
        if changes.trial == Trial.ACCEPT or changes.revival == Revival.UNDO:
            engines = with_lr_states(engines, changes.lr_states)
        reset = self.run.policy.rollback.reset_moments
        self.run.program_loader.load(saved.state, engines, reset=reset)
        return engines

    def _limit_rates(
        self, order: Order, saved: SavedCheckpoint, engines: Engines
    ) -> RatesAfterRollback:
        """Loads the engine states with the limits of rates, norms and numbers after a rollback.

        Args:
            order: the order.
            saved: the restored checkpoint, to whose step the schedules have returned.
            engines: result of `_load_target`.
        """
        engine, step = self.run.policy.engine, saved.step
        # No step has been trained at the rate of the very first state: it may be the start of a
        # warm-up, so it limits only the last rollback that the budget allows.
        trained = step > self.run.record.first_step or order.is_last
        after = limit_rates(
            engine,
            engines,
            order.changes.lr_at_fault,
            self.run.driver.learning_rates(saved.engines),
            healthy=trained,
            learnt=self.run.comparisons.state.ranges.values,
        )
        held = self._held_after(order)
        engines = limit_norms(engine, after.engines, held.norm_limits, freeze=held.freezes(step))
        self.run.driver.load(None, engines)
        self.run.driver.hold_numbers(held.number_ranges)
        return after

    def _held_after(self, order: Order) -> Held:
        """What is held in its healthy range after the rollback of an order."""
        if order.changes.held is None:
            return self.run.holding.held
        return order.changes.held

    def _record_of(
        self,
        order: Order,
        step: int,
        after: RatesAfterRollback,
        rates: Rates,
        lost: int,
        obstacle: RewindObstacle | None,
        lr_scale: float,
    ) -> RollbackRecord:
        """The record of a rollback, with the numbers of repeated and of lost steps.

        Args:
            order: the order.
            step: step of the restored checkpoint.
            after: the learning rates that follow.
            rates: the learning rates before the rollback.
            lost: undone steps that the run does not repeat.
            obstacle: why the data was not rewound, or None.
            lr_scale: the lowest multiplier of all optimizers before the rollback.
        """
        why_lost = rewind_obstacle = ""
        if obstacle is not None:
            rewind_obstacle = str(obstacle)
            if lost:
                why_lost = obstacle.reason
        skipped_steps = self.run.step_batches.steps_of(len({*order.batches}))
        scales, limits = after.scales, after.limits
        lowest = min(scales, key=lambda name: (scales[name], name not in limits), default="")
        return RollbackRecord(
            order=order,
            number=len(self.run.ledger.rollbacks) + 1,
            step=self.run.progress.step,
            continues_at=step,
            skipped=len(order.batches),
            repeated=max(self.run.progress.step - step - lost - skipped_steps, 0),
            lost=lost,
            why_lost=why_lost,
            rewind_obstacle=rewind_obstacle,
            engine=lowest,
            lr=rates.get(lowest),
            lr_limit=limits.get(lowest),
            lr_scale=scales.get(lowest, 1.0),
            lr_scale_before=lr_scale,
        )

    def _forget_undone_steps(self, target: int) -> None:
        """Makes the parts that remember single steps forget the steps from `target` on."""
        run = self.run
        run.comparisons.on_rollback(target)
        if target < run.ledger.accepted_until:  # the record has to say so, for a restart
            run.comparisons.pause_until(run.ledger.accepted_until)
        run.monitor.state.on_rollback(target)
        run.record.part_growth.on_rollback(target)
        run.record.evaluation_growth.on_rollback(target)

    def _commit_rollback(self, done: RollbackRecord) -> None:
        """Replaces the record of the restored checkpoint, and saves it if it is not on disk."""
        saver, step = self.run.saver, done.continues_at
        try:
            saver.replace_record(step)
            on_disk = self.run.store.steps_on_disk
            if self.run.store.durable and step not in run_on_first(self.run.ranks, on_disk):
                saver.save_state_as(step, SaveReason.ROLLBACK)
        except (StoreError, OSError) as error:
            problem = f"the rollback could not be written: {error}; a restart before the next save"
            self.run.log.problem(done.step, f"{problem} does it again")
        saver.report_failures()

    def restore_again(self, step: int) -> None:
        """Restores the checkpoint of the last rollback once more, before any further step.

        Called where the program's code after a pass over the data has run since the rollback, and
        may have changed the restored state. In JAX a pytree is not replaced: the program cannot
        have changed it, and may hold it.

        Args:
            step: step of the checkpoint.
        """
        driver = self.run.driver
        engines, reset = driver.engines(), self.run.program_loader.resets_moments_at(step)

        def load(saved: SavedCheckpoint) -> None:
            if driver.state_is_in_place:
                self.run.program_loader.load(saved.state, engines, reset=reset)

        self.run.saver.wait()
        try:
            _, saved = self.run.stored_checkpoints.load_first_intact([step], load)
        except StateMismatch as error:
            self.run.log.problem(
                step,
                "the program has changed the structure of its model after a pass over the data "
                f"that a rollback has ended early, and the change stays: {error}",
            )
            return
        if saved.position is not None:
            self.run.loaders.rewind(saved.position, (), 0)
        if saved.data_state is not None:
            self.run.pass_states.repeat_pass(saved.data_state)
