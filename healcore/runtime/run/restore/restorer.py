"""`Restorer`: restores checkpoints, for a rollback and for a start alike.

All checks pass before live state changes. A rollback loads its target, and then replaces the record
of the target by one rename. A process that is killed before the rename has changed nothing on disk,
and its successor finds the trouble again. After the rename every start resumes from the target.

    choose steps -> read and check the first intact one -> load it into the live run
        -> limit learning rates and norms -> rewind loaders, forget the undone steps
        -> replace the record of the target (commit)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

from healcore.console import counted, first_of
from healcore.runtime.data.other_ranks import position_of_other_ranks
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.checkpoints.unread_steps import unread_from_text
from healcore.runtime.run.compare.comparison_state import ComparisonState
from healcore.runtime.run.engine_states import (
    engines_after_rollback,
    limit_norms,
    limits_and_budgets,
    with_limits_and_budgets,
    with_lr_states,
)
from healcore.runtime.run.healthy_ranges import HealthyValues, Held
from healcore.runtime.run.host_state import HOST_ITEM, HostParts
from healcore.runtime.run.orders import Order, OrderReason, RollbackRecord
from healcore.runtime.run.restore.stored import SavedCheckpoint, SavedItems, loader_positions
from healcore.runtime.run.rollback.dead_run import Revival, revivals_at
from healcore.runtime.run.rollback.next_trial import Trial
from healcore.runtime.run.rollback.rate_limits import RatesAfterRollback, limit_rates
from healcore.runtime.run.run_record import Ledger, RunRecord, Trials
from healcore.runtime.store.checkpoints import (
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    NoGoodCheckpoint,
    StateMismatch,
    StoreError,
    choose_checkpoints,
)
from healcore.runtime.store.ranks import run_on_first

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

LostSteps: TypeAlias = Callable[[int, str], int]
"""Step of the restored checkpoint, and `RollbackRecord.rewind_obstacle` -> number of undone steps
that the run does not repeat."""
MODEL_CHANGED_SINCE = "the program has changed the structure of its model since"
"""Reason of a rollback that restores weights, and not the place in the run."""


def _none_lost(target: int, obstacle: str) -> int:
    """The `LostSteps` of a loop that repeats every step."""
    return 0


class Restorer:
    """Restores checkpoints, for rollbacks and after a start.

    It does not decide whether to roll back. An `Order` has the reason, the onset of the trouble and
    what changes. For an order this class chooses the checkpoint, and another one where the first
    cannot be read or no longer fits the model. It also decides whether the learning rates of the
    checkpoint count as healthy; `limit_rates` (`rollback/rate_limits.py`) then computes the rates
    that follow. At a start it resumes, and undoes trials that have failed. The restore is
    collective: either every rank loads the same checkpoint, or no rank loads one.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def restore(
        self, order: Order, lost_steps: LostSteps = _none_lost, lr_scale: float = 1.0
    ) -> RollbackRecord:
        """Restores a checkpoint for an order, in the order of the drawing at the top of this file.

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
        saver = self.run.saver
        saver.wait()
        self.run.known_checkpoints.end_probation(before=order.onset)
        self.run.stored_checkpoints.find_damage()
        steps = self._choose(order)
        live, rates = self.run.driver.engines(), self.run.driver.learning_rates()
        order = order.with_changes(lr_at_fault=self._fault_rates(order, live, rates))
        try:
            engines, saved = self._load_first_fitting(
                order, steps, partial(self._load_target, order, live)
            )
        except StateMismatch as mismatch:
            if order.reason.is_optional:
                raise  # the weights are finite: what fits only in part is no remedy
            return self._restore_common(order, steps, mismatch, lr_scale)
        after = self._limit_rates(order, saved.step, engines)
        self.run.record.trials = self._trials_with(order, live, saved)
        skip_more = self.run.policy.rollback.skip_batches
        if order.reason is OrderReason.BATCH:
            skip_more = 0
        obstacle = self.run.loaders.rewind(
            saved.position, order.batches, skip_more, order.changes.read_again
        )
        lost = lost_steps(saved.step, obstacle)
        done = self._record_of(order, saved.step, after, rates, lost, obstacle)
        done = replace(done, lr_scale_before=lr_scale)
        saved_ledger = None if saved.record is None else saved.record.ledger
        self.run.ledger.on_rollback(done, saved_ledger)
        if saved.host is not None:  # after the loaders, which draw random numbers
            self.run.host_state.put_back(saved.host)
        self.run.holding.held = self._held_after(order)
        self.run.comparisons.on_rollback(saved.step)
        if saved.step < self.run.ledger.accepted_until:  # the record has to say so, for a restart
            self.run.comparisons.pause_until(self.run.ledger.accepted_until)
        self.run.record.monitor.on_rollback(saved.step)
        self.run.record.part_growth.on_rollback(saved.step)
        self.run.record.evaluation_growth.on_rollback(saved.step)
        self._forget_changes(since=saved.step)
        saver.begin_attempt(saved.step)
        self._commit_rollback(done)
        return done

    def _trials_with(self, order: Order, live: Engines, saved: SavedCheckpoint) -> Trials:
        """What was in force before the trials for the trouble of an order, with this one.

        Call it before the rollback changes loaders, ledger and what is held.

        Args:
            order: the order.
            live: the engine states before the rollback.
            saved: the checkpoint that is restored.
        """
        record, ledger = self.run.record, self.run.ledger
        trials = record.trials_for(order.onset, self.run.policy.rollback.probation)
        if trials is not None:
            return replace(trials, oldest=min(trials.oldest, saved.step))
        # The live multiplier may be cut already, by the step that has ordered the rollback. But a
        # checkpoint from before an earlier rollback does not know the limits of that rollback.
        engines = live
        known = -1  # number of rollbacks that the checkpoint knows
        if saved.record is not None:
            known = len(saved.record.ledger.rollbacks)
        if known == len(ledger.rollbacks) and saved.engines:
            engines = saved.engines
        return Trials(
            first=len(ledger.rollbacks),
            oldest=saved.step,
            engines=limits_and_budgets(engines),
            skipped=self.run.loaders.skipped_by_loader(),
            held=self.run.holding.held,
            silent_until=self.run.comparisons.state.silent_until,
            accepted=ledger.accepted,
            accepted_until=ledger.accepted_until,
        )

    def no_trials(self, listed: Sequence[CheckpointInfo], *, before: int) -> Trials | None:
        """Trials that have changed nothing, for a start from the newest checkpoint before a step.

        Args:
            listed: the checkpoints, with their statuses.
            before: steps from here on are repeated.

        Returns:
            The trials, or None without such a checkpoint.
        """
        ledger = self.run.ledger
        steps: list[int] = []
        for saved in listed:
            if saved.step < before and saved.is_usable:
                steps.append(saved.step)
        if not steps:
            return None
        return Trials(
            first=len(ledger.rollbacks),
            oldest=max(steps),
            engines={},
            skipped=self.run.loaders.skipped_by_loader(),
            held=self.run.holding.held,
            silent_until=self.run.comparisons.state.silent_until,
            accepted=ledger.accepted,
            accepted_until=ledger.accepted_until,
        )

    def _load_first_fitting(
        self,
        order: Order,
        steps: Sequence[int],
        load: Callable[[SavedCheckpoint], Engines],
    ) -> tuple[Engines, SavedCheckpoint]:
        """Calls `load` with the first intact checkpoint of `steps` that fits the live state.

        If the best checkpoint is from before a change of the model's structure, checkpoints from
        after the change are tried before older ones. Raises StateMismatch of the best one if none
        fits.
        """
        mismatch: StateMismatch | None = None
        remaining = [*steps]
        while remaining:
            try:
                return self.run.stored_checkpoints.load_first_intact(
                    remaining, load, self.run.progress.step
                )
            except StateMismatch as error:
                if error.step is None or error.step not in remaining:
                    raise
                remaining = remaining[remaining.index(error.step) + 1 :]
                if mismatch is None:
                    mismatch = error
                    remaining = [*self._after_change(order, error.step), *remaining]
            except NoGoodCheckpoint:
                if mismatch is None:
                    raise
                break
        assert mismatch is not None
        raise mismatch

    def _after_change(self, order: Order, change: int) -> list[int]:
        """Steps of the finite checkpoints that are newer than `change`, the best first.

        The newest one up to the onset; then, as a last resort, the oldest one after the onset,
        whose arrays are finite at least. Checkpoints that were tried for the same trouble are not
        among them.
        """
        past = self.run.ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        tried = {each.checkpoint for each in past}
        before, after = [], []
        for each in self.run.stored_checkpoints.listed():
            if not each.is_usable:
                continue
            if each.step <= change or each.step in tried:
                continue
            if each.step <= order.onset:
                before.append(each.step)
            else:
                after.append(each.step)
        return [*sorted(before, reverse=True), *sorted(after)]

    def _restore_common(
        self, order: Order, steps: Sequence[int], mismatch: StateMismatch, lr_scale: float
    ) -> RollbackRecord:
        """Restores what a checkpoint has in common with a model whose structure has changed since.

        The run keeps its place. At an earlier place the program would change its model once more,
        which may do harm or raise. So only weights and moments go back. Raises `mismatch` if no
        checkpoint has enough in common.
        """
        driver, saver, step = self.run.driver, self.run.saver, self.run.progress.step
        if self.run.ranks.world > 1:
            raise mismatch
        live = driver.engines()
        found = None
        for each in steps:
            try:
                driver.load_common(self.run.store.restore_common(each, saver.items()))
            except StateMismatch as error:
                mismatch = replace(error, step=each)
            except (CheckpointNotFound, CheckpointDamaged):
                continue
            else:
                found = each
                break
        if found is None:
            raise mismatch
        driver.load(None, engines_after_rollback(self.run.policy.engine, live, {}))
        done = RollbackRecord(
            order=order,
            number=len(self.run.ledger.rollbacks) + 1,
            step=step,
            continues_at=step,
            weights_from=found,
            lost=step - found,
            rewind_obstacle=MODEL_CHANGED_SINCE,
            lr_scale_before=lr_scale,
        )
        self.run.ledger.on_rollback(done, None)
        self.run.comparisons.on_rollback(step)
        self.run.record.monitor.on_rollback(step)
        self.run.comparisons.on_structure_change()
        saver.begin_attempt(step)
        saver.save_state_as(step, SaveReason.ROLLBACK)
        return done

    def _forget_changes(self, *, since: int) -> None:
        """Forgets the program's changes of the model in steps that are undone."""
        record = self.run.record
        record.changes = [each for each in record.changes if each.step < since]
        self.run.loaders.epoch_loop.changed_in = max(
            (each.epoch for each in record.changes), default=-1
        )

    def _choose(self, order: Order) -> tuple[int, ...]:
        """Steps of the checkpoints to try, the best first."""
        if order.anchor_step is not None:
            saves = self.run.stored_checkpoints.listed()
            return choose_checkpoints(saves, onset=order.anchor_step, sound_until_onset=True)
        ledger = self.run.ledger
        past = ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        if order.reason is OrderReason.DEAD_RUN:
            past = revivals_at(order.onset, ledger.in_force)
        if order.reason is OrderReason.BATCH:
            past = []  # the steps since the last rollback have shown that its checkpoint is sound
        return choose_checkpoints(
            self.run.stored_checkpoints.listed(),
            onset=order.onset,
            depth=order.depth,
            tried=[each.checkpoint for each in past],
            initial=(self.run.record.first_step, self.run.known_checkpoints.started_from),
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
        self.load_state(saved.state, engines, reset=self.run.policy.rollback.reset_moments)
        return engines

    def _limit_rates(self, order: Order, step: int, engines: Engines) -> RatesAfterRollback:
        """Loads the engine states with the limits of rates, norms and numbers after a rollback.

        Args:
            order: the order.
            step: step of the restored checkpoint, to which the schedules have returned.
            engines: result of `_load_target`.
        """
        engine = self.run.policy.engine
        # No step has been trained at the rate of the very first state: it may be the start of a
        # warm-up, so it limits only the last rollback that the budget allows.
        trained = step > self.run.record.first_step or order.is_last
        after = limit_rates(
            engine,
            engines,
            order.changes.lr_at_fault,
            self.run.driver.learning_rates(),
            healthy=trained,
            learnt=self.run.comparisons.state.ranges.values,
        )
        held = self._held_after(order)
        engines = limit_norms(engine, after.engines, held.norm_limits, freeze=held.freezes(step))
        self.run.driver.load(None, engines)
        self.run.driver.hold_numbers(held.number_ranges)
        return after

    def _record_of(
        self,
        order: Order,
        step: int,
        after: RatesAfterRollback,
        rates: Rates,
        lost: int,
        obstacle: str,
    ) -> RollbackRecord:
        """The record of a rollback, with the numbers of repeated and of lost steps.

        Args:
            order: the order.
            step: step of the restored checkpoint.
            after: the learning rates that follow.
            rates: the learning rates before the rollback.
            lost: undone steps that the run does not repeat.
            obstacle: why the data was not rewound, or an empty string.
        """
        scales, limits = after.scales, after.limits
        lowest = min(scales, key=lambda name: (scales[name], name not in limits), default="")
        skipped_steps = self.run.step_batches.steps_of(len({*order.batches}))
        return RollbackRecord(
            order=order,
            number=len(self.run.ledger.rollbacks) + 1,
            step=self.run.progress.step,
            continues_at=step,
            skipped=len(order.batches),
            repeated=max(self.run.progress.step - step - lost - skipped_steps, 0),
            lost=lost,
            rewind_obstacle=obstacle,
            engine=lowest,
            lr=rates.get(lowest),
            lr_limit=limits.get(lowest),
            lr_scale=scales.get(lowest, 1.0),
        )

    def _held_after(self, order: Order) -> Held:
        """What is held in its healthy range after the rollback of an order."""
        if order.changes.held is None:
            return self.run.holding.held
        return order.changes.held

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

    def resume(self, newest: RunRecord | None, steps: list[int]) -> tuple[int, HostParts | None]:
        """Resumes from the first intact checkpoint of `steps`, at the start of a process.

        Args:
            newest: the newest record in the store, or None. The run continues with its attempts and
                its settings, also if an older checkpoint has to be loaded.
            steps: steps of the checkpoints, in descending order.

        Returns:
            The step, and the argument of `HostState.put_back` for when the loop has a loader.

        Raises:
            NoGoodCheckpoint: no checkpoint is intact.
            StateMismatch: the newest intact one is of another state. An older checkpoint that fits
                would lose the steps since then.
        """
        trials = failed_trials(newest)
        if trials is not None and trials.oldest in steps:
            steps = [each for each in steps if each <= trials.oldest]
        self._add_param_groups(steps)
        load = partial(self._load_resumed, newest=newest)
        try:
            weights, saved = self.run.stored_checkpoints.load_first_intact(steps, load)
        except StateMismatch as error:
            where = self.run.store.place
            raise replace(error, where=where, advice=_advice_for(newest)) from None
        own, _ = _without_failed_trials(saved, newest)
        self._continue_from(own, saved, weights)
        record = self.run.record
        record.continue_from(newest or own)
        if trials is not None:
            record.trials = None
        record.part_growth.on_rollback(own.step)
        record.evaluation_growth.on_rollback(own.step)
        self._forget_changes(since=own.step)
        self.run.driver.structure_changes()  # those of the restart itself
        self.run.saver.begin_attempt(own.step)
        record.is_in_body = own.is_in_body
        if own.last_regular is not None:
            self.run.schedule.last_regular = own.last_regular
        return own.step, saved.host

    def _load_resumed(self, saved: SavedCheckpoint, *, newest: RunRecord | None) -> dict[int, Any]:
        """Loads the state of a checkpoint of an earlier process.

        Returns:
            Step -> weights of that step, which a comparison needs.
        """
        own, engines = _without_failed_trials(saved, newest)
        weights = self._copies(own.comparisons, saved.step)
        repeats = own.repeats_undone_steps(saved.step)
        reset = repeats and self.run.policy.rollback.reset_moments
        if not self.run.comparisons.is_enabled:
            engines = limit_norms(self.run.policy.engine, engines, {})
        self.load_state(saved.state, engines, reset=reset)
        if failed_trials(newest) is not None:
            self._apply_rates(engines)
        needed: list[int] = []
        if own.comparisons is not None and self.run.comparisons.is_enabled:
            needed = own.comparisons.needed()
        if saved.step in needed:
            weights[saved.step] = self.run.driver.copy_weights()
        return weights

    def _continue_from(
        self, own: RunRecord, saved: SavedCheckpoint, weights: Mapping[int, Any]
    ) -> None:
        """Continues comparisons, ledger, monitor and loaders from a checkpoint that was loaded.

        Args:
            own: the record of the checkpoint, see `_without_failed_trials`.
            saved: the checkpoint.
            weights: result of `_load_resumed`.
        """
        batches = None
        if saved.host is not None:
            batches = saved.host.batches
        if own.unread:
            self.run.step_reader.resume(unread_from_text(own.unread, batches or {}))
        if own.comparisons is not None:
            self.run.comparisons.continue_from(
                own.comparisons, weights, step=saved.step, batches=batches
            )
        self.run.ledger.continue_from(own.ledger, saved.step)
        self.run.record.monitor.continue_from(own.monitor)
        positions = {**(saved.position or {})}
        if own.repeats_undone_steps(saved.step):
            positions |= _kept_positions(own, saved)
        self.run.loaders.resume(positions, own.skipped)

    def _apply_rates(self, engines: Engines) -> None:
        """Computes the multipliers again, for the learning rates of the loaded checkpoint."""
        rates, engine = self.run.driver.learning_rates(), self.run.policy.engine
        none = HealthyValues()
        after = limit_rates(engine, engines, None, rates, healthy=False, learnt=none)
        self.run.driver.load(None, after.engines)

    def _add_param_groups(self, steps: Sequence[int]) -> None:
        """Adds the parameter groups of the newest checkpoint that the program has not added yet."""
        groups = self.run.stored_checkpoints.param_groups(steps)
        added = self.run.driver.add_param_groups(groups) if groups else []
        if added:
            self.run.log.info(
                f"the optimizer has received {counted(len(added), 'parameter')} that the run had "
                f"added with add_param_group: {first_of(added)}. A call for the same parameters "
                "finds the group there"
            )

    def load_state(self, saved: SavedItems, engines: Engines, *, reset: bool) -> None:
        """Puts the user's state of a checkpoint into the live run.

        Args:
            saved: items of the checkpoint, by name. Healcore's own item is not loaded.
            engines: engine states to load with it.
            reset: whether the moments of the optimizers start again at zero.
        """
        state = {name: each for name, each in saved.items() if name != HOST_ITEM}
        self.run.driver.load(state, engines, reset_moments=reset)

    def load_state_of(self, step: int) -> None:
        """Loads the user's state of a checkpoint, without healcore's record.

        The engines keep their states, and no step is undone. Moments of the optimizers are reset as
        after a rollback, if the policy says so.

        Args:
            step: step of the checkpoint.
        """
        saved = self.run.store.restore(step, self.run.saver.items()).state
        self.load_state(saved, {}, reset=self._resets_at(step))

    def _resets_at(self, step: int) -> bool:
        """Whether the moments start again at a checkpoint, because a rollback repeats from it."""
        record = self.run.record
        return self.run.policy.rollback.reset_moments and record.repeats_undone_steps(step)

    def restore_again(self, step: int) -> None:
        """Restores the checkpoint of the last rollback once more, before any further step.

        In JAX a pytree is not replaced: the program cannot have changed it, and may hold it.
        """
        driver = self.run.driver
        engines, reset = driver.engines(), self._resets_at(step)

        def load(saved: SavedCheckpoint) -> None:
            if driver.state_is_in_place:
                self.load_state(saved.state, engines, reset=reset)

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
        if saved.host is not None:
            self.run.pass_states.repeat_pass(saved.host)

    def _copies(self, saved: ComparisonState | None, resumed: int) -> dict[int, Any]:
        """The weights of older checkpoints that a comparison needs, by step; changes live state.

        A checkpoint that some rank cannot load is skipped. The resumed one is not affected.
        """
        copies: dict[int, Any] = {}
        if saved is None or not self.run.comparisons.is_enabled:
            return copies
        for step in saved.needed():
            if step >= resumed:
                continue
            weights = None
            try:
                self.load_state_of(step)
                weights = self.run.driver.copy_weights()
            except Exception as error:
                problem = f"the weights of checkpoint {step} cannot be compared: {error}"
                self.run.log.event("problem", step=resumed, problem=problem)
            if all(self.run.ranks.gather(weights is not None)):
                copies[step] = weights
        return copies


def failed_trials(newest: RunRecord | None) -> Trials | None:
    """The trials that have not kept the run from a stop, which a start undoes; or None.

    Args:
        newest: the newest record in the store, or None.
    """
    if newest is None or newest.trials is None or not newest.trials.failed:
        return None
    return newest.trials


def _without_failed_trials(
    saved: SavedCheckpoint, newest: RunRecord | None
) -> tuple[RunRecord, Engines]:
    """The record and the engine states of a checkpoint.

    If the run has stopped, they are without the changes by the trials for the trouble of the stop.

    Args:
        saved: the checkpoint.
        newest: the newest record in the store, or None.
    """
    own = saved.record or RunRecord(first_step=saved.step, step=saved.step)
    trials = failed_trials(newest)
    if newest is None or trials is None:
        return own, saved.engines
    engines = with_limits_and_budgets(saved.engines, trials.engines)
    return _without_trials(own, newest.ledger, trials), engines


def _without_trials(own: RunRecord, ledger: Ledger, trials: Trials) -> RunRecord:
    """The record of a checkpoint without the changes by trials.

    Args:
        own: the record.
        ledger: the newest ledger of the run, which counts all rollbacks.
        trials: what was in force before the trials.
    """
    comparisons = own.comparisons
    if comparisons is not None:
        ranges = replace(comparisons.ranges, held=trials.held)
        comparisons = replace(comparisons, ranges=ranges, silent_until=trials.silent_until)
    return replace(
        own,
        ledger=ledger.without_trials(trials, own.ledger),
        skipped=trials.skipped,
        comparisons=comparisons,
    )


def _kept_positions(own: RunRecord, saved: SavedCheckpoint) -> dict[str, Any]:
    """Number of a loader that the last rollback did not rewind -> its position, which it keeps.

    If the number of ranks has changed since, its epoch begins again, as the epochs of the other
    loaders do.
    """
    saved_by = None
    for each in loader_positions(saved.position).values():
        if "ranks" in each:
            saved_by = each["ranks"]
            break
    if not saved_by:
        return dict(own.forward)
    moved = {}
    for name, position in own.forward.items():
        moved[name] = position_of_other_ranks(position, saved_by)
    return moved


def _advice_for(newest: RunRecord | None) -> str:
    """What to do about a checkpoint that does not fit, if the program has changed its model."""
    if newest is None or not newest.changes:
        return ""
    which = ", ".join(f"at step {each.step} (epoch {each.epoch})" for each in newest.changes[-3:])
    return (
        f"The program has changed the structure of its model while it trained, {which}. Make the "
        "same changes before `with Healer(...)`, and not again in the loop; "
        'docs/data-and-resume.md shows it under "A model that changes while it trains"'
    )
