"""`WayBack`: continues the run from a checkpoint. A rollback is a resume in the same process.

    choose      the checkpoints to try, the best first (a rollback; a start has its own rule)
    load        read and check the first intact one, put it into the live run
    rewind      loaders and random states
    continue    what is known of the steps comes back with the checkpoint; the envelope is held
    commit      replace the record of the checkpoint by one rename (a rollback)

All checks pass before live state changes. A process that is killed before the rename has changed
nothing on disk, and its successor finds the trouble again. After the rename every start resumes
from this checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from healcore.runtime.data.positions import positions_of_other_ranks
from healcore.runtime.data.readers import RewindObstacle
from healcore.runtime.data.sources import OTHER_LOADER
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.data_state import SavedDataState
from healcore.runtime.run.engine_states import (
    engines_after_rollback,
    engines_of_new_start,
    rates_of,
    with_rates,
)
from healcore.runtime.run.envelope import Envelope, SavedRate
from healcore.runtime.run.healthy_ranges import HealthyValues
from healcore.runtime.run.restore.stored import SavedCheckpoint
from healcore.runtime.run.rollback.rate_limits import limit_rates
from healcore.runtime.run.rollback.remedy import Outcome, Remedy
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from healcore.runtime.store.checkpoints import (
    NoGoodCheckpoint,
    StateMismatch,
    StoreError,
    choose_checkpoints,
)
from healcore.runtime.store.ranks import broadcast, run_on_first

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class WayBack:
    """Continues the run from a checkpoint: at a start, and at a rollback.

    It does not decide whether to roll back, and what is held: that is the table of
    `rollback/remedy.py`. A restore is collective: either every rank loads the same checkpoint, or
    no rank loads one.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    def continue_from(
        self,
        saved: SavedCheckpoint,
        own: RunRecord,
        envelope: Envelope,
        weights: Mapping[int, Any] = {},
    ) -> None:
        """Continues the run from a checkpoint that was loaded, at a start and at a rollback.

        Whatever depends on steps comes back with the checkpoint.

        Args:
            saved: the checkpoint.
            own: its record.
            envelope: what is held from then on.
            weights: step -> weights of that step, for comparisons with it, besides those in memory.
        """
        run = self.run
        run.record.go_back_to(own)
        run.witness.continue_from(own.comparisons, saved.step, weights)
        run.holding.hold(envelope, saved.step)
        run.saver.begin_attempt(saved.step)
        run.monitor.read_engines()

    # -- a rollback -----------------------------------------------------------------------------

    def choose(self, trouble: Trouble, *, depth: int = 1, tried: Sequence[int] = ()) -> list[int]:
        """Steps of the snapshots that may be restored for a trouble, the best first. Collective.

        Args:
            trouble: the trouble.
            depth: known-good checkpoint to begin with, 1 for the newest before the onset.
            tried: steps of the snapshots that were restored for it. Older ones are better.

        Raises:
            NoGoodCheckpoint: there is none.
            StateMismatch: all are from before the newest change of the model's structure, and do
                not fit.
            StoreError: the store cannot be read.
        """
        saver, onset = self.run.saver, trouble.onset
        saver.wait()
        saver.end_probation(before=onset)
        self.run.stored_checkpoints.find_damage()
        if trouble.better_step is not None:
            onset, tried = trouble.better_step, ()
        initial = [self.run.record.first_step]
        if saver.started_from is not None:
            initial.append(saver.started_from)
        saves, changes = self.run.stored_checkpoints.listed(), self.run.record.changes
        fitting = saves
        if changes:  # the run with the new structure begins with the first save after the change
            fitting = [each for each in saves if each.step > changes[-1].step and each.is_usable]
            initial += [each.step for each in fitting[:1]]
        among = partial(
            choose_checkpoints,
            onset=onset,
            depth=depth,
            tried=tried,
            initial=initial,
            sound_until_onset=trouble.sound_before,
        )
        try:
            return [*among(fitting)]
        except NoGoodCheckpoint:
            if not changes:
                raise
            at = changes[-1].step
            difference = f"the program has changed the structure of its model at step {at}"
            advice = "No rollback crosses such a change"
            raise StateMismatch(among(saves)[0], [difference], advice=advice) from None

    def roll_back(self, trouble: Trouble, chosen: Remedy, steps: Sequence[int]) -> RollbackRecord:
        """Restores a snapshot for a trouble, and holds an envelope.

        Args:
            trouble: the trouble.
            chosen: what is held from then on.
            steps: steps of the snapshots to try, the best first.

        Returns:
            The rollback, as it is in the record of the restored checkpoint.

        Raises:
            NoGoodCheckpoint: no checkpoint is usable. A failed load may have changed a part of the
                live state.
            StateMismatch: the state differs in structure from every checkpoint.
            StoreError: the store cannot be read.
        """
        run, accepts = self.run, chosen.outcome is Outcome.ACCEPT
        live, rates = run.driver.engines(), run.driver.learning_rates()
        lr_scale = run.metrics.lr_scale
        undone = chosen.envelope.rates if accepts else {}

        # Load.
        load = partial(self._load_target, undone, live)
        engines, saved = run.stored_checkpoints.load_first_intact(steps, load, run.progress.step)

        # Hold.
        own = saved.record or RunRecord(step=saved.step)
        healthy = run.record.healthy.with_better(own.healthy)
        at_fault = self._fault_rates(live, rates, healthy) if chosen.limits_rate else None
        before = replace(run.holding.envelope, rates=self._rates_before(live, saved))
        after = limit_rates(
            run.policy.engine,
            engines,
            at_fault,
            run.driver.learning_rates(saved.engines),
            # No step has been trained at the rate of the very first state.
            healthy=saved.step > run.record.first_step or chosen.is_last,
            learnt=healthy,
        )
        envelope = replace(chosen.envelope, rates={})

        # Rewind.
        new = envelope.beyond(before).left_out
        more = 0 if trouble.exact else run.policy.rollback.skip_batches
        run.loaders.skip(new, more, before.beyond(envelope).left_out)
        obstacle = run.loaders.seek(saved.position)
        lost = self._lost_steps(saved.step, obstacle)
        why_lost = obstacle.reason if obstacle is not None and lost else ""
        skipped_steps = run.step_batches.steps_of(len({*new}))
        lowest = min(
            after.scales,
            key=lambda name: (after.scales[name], name not in after.limits),
            default="",
        )
        done = RollbackRecord(
            trouble=trouble,
            accepts=accepts,
            limits_rate=chosen.limits_rate,
            before=before,
            after=envelope,
            number=len(run.ledger.rollbacks) + 1,
            step=run.progress.step,
            checkpoint=saved.step,
            repeated=max(run.progress.step - saved.step - lost - skipped_steps, 0),
            lost=lost,
            why_lost=why_lost,
            rewind_obstacle="" if obstacle is None else str(obstacle),
            engine=lowest,
            lr=rates.get(lowest),
            lr_at_fault=None if at_fault is None else at_fault.get(lowest),
            lr_limit=after.limits.get(lowest),
            lr_scale=after.scales.get(lowest, 1.0),
            lr_scale_before=lr_scale,
        )
        run.ledger.add_rollback(done)
        if saved.data_state is not None:  # after the loaders, which draw random numbers
            run.data_state.set_random_states(saved.data_state)
        run.driver.load(None, after.engines)
        self.continue_from(saved, replace(own, healthy=healthy), envelope)
        self._commit_rollback(done)
        return done

    def _fault_rates(self, live: Engines, rates: Rates, healthy: HealthyValues) -> dict[str, float]:
        """Engine name -> the rate in force that a ceiling answers.

        The highest rate since the last rollback if it was above every healthy one, else the present
        one; and the multiplier alone where the rate is unknown, or where the policy cuts the
        multiplier, whatever the rate is.
        """
        highest = self.run.journal.rates
        engine, at_fault = self.run.policy.engine, dict[str, float]()
        for name, state in live.items():
            scale = float(engine.from_dict(state).lr.scale)
            rate = rates.get(name)
            at_fault[name] = (1.0 if rate is None else rate) * scale
            if not engine.limits_lr:
                at_fault[name] = scale
            elif name in highest and healthy.healthy_rate(name, highest[name]) < highest[name]:
                at_fault[name] = highest[name]
        return broadcast(self.run.ranks, at_fault)

    def _rates_before(self, live: Engines, saved: SavedCheckpoint) -> dict[str, SavedRate]:
        """The multipliers and ceilings from before the trouble, which undoing restores.

        The live multiplier may be cut already, by the step that has asked for the rollback. But a
        checkpoint from before an earlier rollback does not know the ceilings of that rollback.
        """
        known = None if saved.record is None else len(saved.record.ledger.rollbacks)
        if saved.engines and known == len(self.run.ledger.rollbacks):
            return rates_of(saved.engines)
        return rates_of(live)

    def _load_target(
        self, undone: Mapping[str, SavedRate], live: Engines, saved: SavedCheckpoint
    ) -> Engines:
        """Loads the target of a rollback. Returns the engine states that are loaded with it."""
        engines = engines_after_rollback(self.run.policy.engine, live, saved.engines)
        engines = with_rates(engines, undone)
        self.run.stored_checkpoints.load_program(saved.state, engines)
        return engines

    def _lost_steps(self, target: int, obstacle: RewindObstacle | None) -> int:
        """Steps since `target` that the loop does not repeat, where the data was not rewound.

        A loop that counts steps takes as many steps as without the rollback, with later data.
        """
        if obstacle is None or self.run.recovery.counts_steps or self.run.recovery.ends_by_steps:
            return 0
        newest_loader = obstacle == OTHER_LOADER
        end = self.run.journal.loader_start if newest_loader else self.run.progress.step
        return max(end - target, 0)

    def _commit_rollback(self, done: RollbackRecord) -> None:
        """Replaces the record of the restored checkpoint, and saves it if it is not on disk."""
        saver, step = self.run.saver, done.checkpoint
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
        engines = driver.engines()

        def load(saved: SavedCheckpoint) -> None:
            if driver.state_is_in_place:
                self.run.stored_checkpoints.load_program(saved.state, engines)

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
        if saved.data_state is not None:
            self.run.data_state.set_random_states(saved.data_state)
            self.run.data_state.resume(saved.data_state)

    # -- a start --------------------------------------------------------------------------------

    def resume(
        self, newest: RunRecord | None, steps: list[int]
    ) -> tuple[int, SavedDataState | None]:
        """Resumes from the first intact checkpoint of `steps`, at the start of a process.

        Args:
            newest: the newest record in the store, or None. The run continues with its attempts and
                its settings, also if an older checkpoint has to be loaded.
            steps: steps of the checkpoints, in descending order.

        Returns:
            The step of the checkpoint; and its random states and positions, for
            `DataState.resume`, or None if the program's own random states stay.

        Raises:
            NoGoodCheckpoint: no checkpoint is intact.
            StateMismatch: the newest intact one is of another state. An older checkpoint that fits
                would lose the steps since then.
        """
        try:
            weights, saved = self.run.stored_checkpoints.load_first_intact(
                steps, self._load_resumed
            )
        except StateMismatch as error:
            where = self.run.store.place
            raise replace(error, where=where, advice=_advice_for(newest)) from None
        own = saved.record or RunRecord(first_step=saved.step, step=saved.step)
        self.run.record.continue_run(newest or own)
        self.run.loaders.resume_skipped(own.skipped)
        positions = saved.position
        if positions is not None and own.repeats_undone_steps(saved.step):
            kept = own.forward
            if own.world != self.run.ranks.world:
                kept = positions_of_other_ranks(kept, own.world)
            positions = {**positions, "sources": {**positions["sources"], **kept}}
        self.run.loaders.seek(positions)
        self.continue_from(saved, own, own.envelope, weights)
        epochs = [each.epoch for each in self.run.record.changes]
        self.run.loaders.epoch_loop.changed_in = max(epochs, default=None)
        # Drops the changes that the restart has made: they are not the program's.
        self.run.driver.structure_changes()
        if own.last_regular is not None:
            self.run.schedule.last_regular = own.last_regular
        return saved.step, saved.data_state

    def _load_resumed(self, saved: SavedCheckpoint) -> dict[int, Any]:
        """Loads the state of a checkpoint of an earlier process.

        Returns:
            Step -> weights of that step, which a comparison needs.
        """
        own = saved.record or RunRecord(step=saved.step)
        needed: list[int] = []
        if self.run.witness.is_enabled:
            needed = [each.step for each in own.comparisons.anchors]
        weights = self._copies(needed, saved.step)
        self.run.stored_checkpoints.load_program(saved.state, saved.engines)
        if saved.step in needed:
            weights[saved.step] = self.run.driver.copy_weights()
        return weights

    def _copies(self, needed: Sequence[int], resumed: int) -> dict[int, Any]:
        """The weights of the needed checkpoints before the resumed one; changes live state.

        A checkpoint that some rank cannot load is skipped. The resumed one is not affected.
        """
        copies: dict[int, Any] = {}
        for step in needed:
            if step >= resumed:
                continue
            weights = None
            try:
                self.run.stored_checkpoints.load_step(step)
                weights = self.run.driver.copy_weights()
            except Exception as error:
                problem = f"the weights of checkpoint {step} cannot be compared: {error}"
                self.run.log.event("problem", step=resumed, problem=problem)
            if all(self.run.ranks.gather(weights is not None)):
                copies[step] = weights
        return copies

    # -- an end ---------------------------------------------------------------------------------

    def after_stop(self, onset: int, *, repeats_skips: bool) -> None:
        """Lets the next start take the oldest snapshot that was restored for the trouble of a stop.

        What was tried for it has not helped, so the start begins with what was held before, and
        with the budgets and rates of a new run. Collective. If the record cannot be written, the
        log says so, because the run stops all the same.

        Args:
            onset: step at which the trouble begins.
            repeats_skips: whether the next start repeats the steps since the first skipped step,
                also if no rollback was tried for them.
        """
        run = self.run
        tries = run.ledger.same_trouble(onset, run.policy.rollback.probation)
        step, which, before = None, "the oldest one that a rollback has restored", None
        if tries:
            step, before = min(each.checkpoint for each in tries), tries[0].before
            which += "; the rates, batches and values that the rollbacks have changed are undone"
        try:
            run.saver.wait()
            if not tries and repeats_skips:
                which = "the newest one before the first skipped step"
                first_skip = next(iter(run.journal.unhealthy), run.progress.step)
                step = self._newest_usable(before=first_skip + 1)
            if step is None or not self._begin_next_start(step, before):
                return
            run.log.info(
                f"the next start resumes from the checkpoint of step {step}, {which}. Mend the "
                "program, and start it again"
            )
        except (StoreError, OSError) as error:
            problem = f"the stop could not be written: {error}; a restart begins with the limits"
            run.log.problem(run.progress.step, f"{problem} and the skipped batches of today")

    def repeat_from(self, *, before: int) -> int | None:
        """Makes the next start resume from the newest checkpoint before a step. Collective.

        Args:
            before: steps from here on are repeated.

        Returns:
            The step of the checkpoint, or None if the next start resumes from the newest one.
        """
        try:
            step = self._newest_usable(before=before)
            if step is not None and self._begin_next_start(step):
                return step
        except (StoreError, OSError):
            pass
        return None

    def _newest_usable(self, *, before: int) -> int | None:
        """Step of the newest usable checkpoint before a step, or None without one."""
        saves = self.run.saver.listed()
        return max(
            (each.step for each in saves if each.step < before and each.is_usable), default=None
        )

    def _begin_next_start(self, step: int, before: Envelope | None = None) -> bool:
        """Begins an attempt at a checkpoint on disk only: a rollback that the next start completes.

        Args:
            step: step of the checkpoint.
            before: what was held before the tries of a run that stops, which are undone; or None.

        Returns:
            Whether the record was written. It is not without a disk, or if a trainer saves.
        """
        run, now = self.run, self.run.record
        saved = run.stored_checkpoints.records().get(step)
        if saved is None or run.store.trainer_save is not None or not run.store.durable:
            return False
        record = now.at(saved)
        record.attempts = [*now.attempts, step]
        record.known_good_up_to = min(now.known_good_up_to, step)
        if before is not None:
            record.ledger.stop(step)
            read_again = [list(each) for each in saved.envelope.beyond(before).left_out]
            for source, batches in saved.skipped.items():
                record.skipped[source] = [each for each in batches if each not in read_again]
            record.envelope = before
            record.engines = engines_of_new_start(run.policy.engine, saved.engines)
            record.comparisons.silent_until = 0
        run.store.replace_record(step, record.to_dict())
        return True


def _advice_for(newest: RunRecord | None) -> str:
    """What to do about a checkpoint that does not fit, if the program has changed its model.

    Args:
        newest: the newest record in the store, or None.

    Returns:
        Sentences for the error message, or an empty string without a change.
    """
    if newest is None or not newest.changes:
        return ""
    which = ", ".join(f"at step {each.step} (epoch {each.epoch})" for each in newest.changes[-3:])
    return (
        f"The program has changed the structure of its model while it trained, {which}. Make the "
        "same changes before `with Healer(...)`, and not again in the loop; "
        'docs/data-and-resume.md shows it under "A model that changes while it trains"'
    )
