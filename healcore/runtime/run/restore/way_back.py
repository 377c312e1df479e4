"""`WayBack`: continues the run from a checkpoint. A rollback is a resume in the same process.

    choose      the checkpoints to try, the best first (a rollback; a start has its own rule)
    load        read and check the first one that is intact on every rank, put it into the live run
    rewind      loaders and random states
    continue    what is known of the steps comes back with the checkpoint; the envelope is held
    commit      replace the record of the checkpoint by one rename (a rollback)

All checks pass before live state changes. A process that is killed before the rename has changed
nothing on disk, and its successor finds the trouble again. After the rename every start resumes
from this checkpoint.

Reading is collective. A rank may lack a checkpoint, or find it damaged, that the others could load:
its copy in memory is gone, or its disk has a fault. All ranks then take the next older one, because
weights of different steps would not fit together.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from healcore.core.decision import Cause
from healcore.core.step_record import SKIPS
from healcore.runtime.data.positions import check_positions, positions_of_other_ranks
from healcore.runtime.data.sources import OTHER_LOADER
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.faults.classification import classify
from healcore.runtime.run.checkpoints.saver import SaveReason
from healcore.runtime.run.data_state import DATA_STATE_ITEM, SavedDataState
from healcore.runtime.run.engine_states import (
    compatible_states,
    engines_after_rollback,
    engines_of_new_start,
    limit_rates,
    rates_of,
    with_rates,
)
from healcore.runtime.run.envelope import Envelope
from healcore.runtime.run.healthy_ranges import HealthyValues
from healcore.runtime.run.rollback.remedy import Outcome, Remedy
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.run.trouble import RollbackRecord, Trouble
from healcore.runtime.store.checkpoints import (
    MEMORY,
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    NoGoodCheckpoint,
    StateMismatch,
    StoreError,
    choose_checkpoints,
)
from healcore.runtime.store.ranks import RankFailed, broadcast, run_on_first
from healcore.runtime.store.values import attribute

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

T = TypeVar("T")


class SavedCheckpoint(NamedTuple):
    """The content of a checkpoint, after its checks and before any use.

    All parts are decoded before the first part is loaded. A checkpoint with one unreadable part
    then changes nothing, and an older checkpoint can be tried.
    """

    step: int
    """Step of the checkpoint."""
    state: dict[str, Any]
    """The user's state, without healcore's item."""
    record: RunRecord
    """Healcore's record, or an empty one if another program has saved the checkpoint."""
    engines: Engines
    """The engine states that fit this policy, by engine name."""
    data_state: SavedDataState | None
    """Random states and positions of the loaders, or None if they cannot be used."""

    @property
    def position(self) -> dict[str, Any] | None:
        """Positions of the loaders, or None."""
        if self.data_state is None:
            return None
        return self.data_state.data


class WayBack:
    """Lists and loads checkpoints, and continues the run from one: at a start, and at a rollback.

    It does not decide whether to roll back, and what is held: that is the table of
    `rollback/remedy.py`. A restore is collective: either every rank loads the same checkpoint, or
    no rank loads one.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run

    # -- the checkpoints of all ranks -----------------------------------------------------------

    def listed(self) -> list[CheckpointInfo]:
        """The checkpoints that every rank lists, as rank 0 sees them. Collective."""
        of_ranks = self.run.ranks.gather(self.run.saver.listed())
        common = set.intersection(*({saved.step for saved in saves} for saves in of_ranks))
        return [saved for saved in of_ranks[0] if saved.step in common]

    def records(self) -> dict[int, RunRecord]:
        """The records of the checkpoints on disk and in memory. Reads no arrays. Collective.

        Returns:
            Step -> its record. One that cannot be read is left to the restore, which reports it.
        """
        stored: Mapping[int, Mapping[str, Any]] = {}
        if self.run.ranks.rank == 0:
            with suppress(StoreError):
                stored = self.run.store.records()
        found: dict[int, RunRecord] = {}
        for step, each in broadcast(self.run.ranks, stored).items():
            with suppress(Exception):
                found[step] = RunRecord.of(each)
        return found

    def newest_record(self) -> RunRecord | None:
        """The record of the newest step of the latest attempt, or None. Collective."""
        records = self.records().values()
        return max(records, key=lambda each: (len(each.attempts), each.step), default=None)

    def find_damage(self) -> None:
        """Reports checkpoints that are too damaged for a listing. Collective.

        Rank 0 looks for them, and all ranks report the same. A store that cannot be read reports
        nothing here: the restore raises about it.
        """
        damaged = []
        with suppress(StoreError):  # a missing disk is reported where it is needed
            damaged = self.run.store.damaged()
        for error in broadcast(self.run.ranks, damaged):
            self.run.saver.report_damage(error)

    # -- loading --------------------------------------------------------------------------------

    def load_first_intact(self, steps: Sequence[int]) -> SavedCheckpoint:
        """Loads the first checkpoint that all ranks can load. Collective.

        A checkpoint with intact digests counts as damaged if its values cannot be loaded. If no
        checkpoint can be loaded, a part of the live state may have changed.

        Args:
            steps: steps of the checkpoints to try, the best first.

        Raises:
            NoGoodCheckpoint: no checkpoint of `steps` can be loaded on all ranks.
            StateMismatch: the first intact checkpoint does not fit the live state.
        """
        problems: list[str] = []
        for step in steps:
            try:
                saved = self._adapted_to_world(self._on_all_ranks(step, self._read, step))
                self._on_all_ranks(step, self.run.driver.load, saved.state, saved.engines)
                return saved
            except CheckpointNotFound:
                continue
            except CheckpointDamaged as error:
                problems.append(str(error))
                self.run.saver.report_damage(error)
        reasons = "; ".join(problems) or "none of them is on every rank"
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(steps)} can be restored: {reasons}")

    def _on_all_ranks(self, step: int, action: Callable[..., T], *given: Any) -> T:
        """Reads or loads a checkpoint. If a rank fails, all ranks raise. Collective.

        Raises:
            CheckpointNotFound: a rank lacks the checkpoint.
            CheckpointDamaged: a rank cannot use it.
            Exception: the state does not fit, or memory is exhausted, so that an older checkpoint
                would not help.
        """
        result: Any = None
        failure: Exception | None = None
        place = self.run.store.place or MEMORY
        try:
            result = action(*given)
        except StateMismatch as error:
            failure = replace(error, step=step)
        except Exception as error:
            failure = error
            known = isinstance(error, CheckpointNotFound | CheckpointDamaged)
            if not known and classify(error).cause is not Cause.OOM:
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                text = f"holds values that healcore does not write ({why})"
                failure = CheckpointDamaged(step, place, "its content", text)
        severities = {type(None): 0, CheckpointNotFound: 1, CheckpointDamaged: 2}
        severity = severities.get(type(failure), 3)
        worst = max(self.run.ranks.gather(severity))
        if worst == 0:
            return result
        if failure is not None and severity == worst:
            raise failure
        if worst == 1:
            raise CheckpointNotFound(f"a rank lacks the checkpoint of step {step}")
        if worst == 2:
            raise CheckpointDamaged(step, place, "its content", "cannot be loaded by another rank")
        raise RankFailed("another rank cannot load it")

    def _read(self, step: int) -> SavedCheckpoint:
        """Reads and checks a checkpoint. Malformed values raise any exception."""
        run = self.run
        state, saved_record = run.store.restore(step, run.saver.items())
        data_state = SavedDataState.read(state.pop(DATA_STATE_ITEM, None))
        record = RunRecord(first_step=step, step=step, world=run.ranks.world)
        if saved_record is not None:
            record = RunRecord.of(saved_record)
            if record.step != step:
                raise StoreError(f"its record is of step {record.step}")
            if data_state is None and record.world == run.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
        if data_state is not None:
            check_positions(data_state.data)
        engines, problem = compatible_states(run.policy.engine, record.engines)
        if problem:
            run.log.event("problem", step=run.progress.step or step, problem=problem)
        return SavedCheckpoint(step, state, record, engines, data_state)

    def _adapted_to_world(self, saved: SavedCheckpoint) -> SavedCheckpoint:
        """Adapts this rank's part if the number of ranks has changed: all continue as rank 0.

        Random generators stay as the program has set them: added ranks have no saved state.
        """
        run, saved_by = self.run, saved.record.world
        world = run.ranks.world
        if saved_by == world:
            return saved
        parts = run.ranks.gather(saved.position)
        wrong = []
        for name, item in run.saver.items().items():
            if name != DATA_STATE_ITEM and attribute(item, "per_rank"):
                wrong.append(
                    f'"{name}" was saved in {saved_by} parts, one for each rank, but the number of '
                    f"ranks is {world} now"
                )
        places = [_places(part) for part in parts[:saved_by]]
        if any(each != places[0] for each in places):
            wrong.append(f"its {saved_by} ranks were at different batches of their loaders")
        if wrong:
            raise StateMismatch(saved.step, wrong)
        run.log.problem(
            saved.step,
            f"checkpoint {saved.step} was saved by {saved_by} ranks, but this run has {world}: the "
            "saved random generators are not used; the loaders begin the epoch again and discard "
            "the batches before the checkpoint",
        )
        if parts[0] is None:
            return saved._replace(data_state=None)
        moved = positions_of_other_ranks(parts[0]["sources"], saved_by)
        positions = {**parts[0], "sources": moved}
        return saved._replace(data_state=SavedDataState({}, {}, positions))

    def load_step(self, step: int) -> SavedCheckpoint:
        """Loads the program's state of a checkpoint, without healcore's record.

        The engines keep their states, and no step is undone.

        Args:
            step: step of the checkpoint.
        """
        saved = self._read(step)
        self.run.driver.load(saved.state, {})
        return saved

    # -- the one way back -----------------------------------------------------------------------

    def _continue_from(
        self, saved: SavedCheckpoint, envelope: Envelope, weights: Mapping[int, Any] = {}
    ) -> None:
        """Continues the run from a checkpoint that was loaded, at a start and at a rollback.

        Whatever depends on steps comes back with the checkpoint.

        Args:
            saved: the checkpoint.
            envelope: what is held from then on.
            weights: step -> weights of that step, for comparisons with it, besides those in memory.
        """
        run = self.run
        run.progress.step = saved.step
        unread = run.dispatch_queue.peek_all()
        run.ledger.skips += sum(each.why in SKIPS for each in unread)
        run.record.go_back_to(saved.record)
        run.dispatch_queue.clear()
        run.step_batches.clear()
        run.witness.continue_from(saved.record.comparisons, saved.step, weights)
        run.holding.hold(envelope, saved.step)
        run.saver.begin_attempt(saved.step)
        run.metrics.read()

    # -- a rollback -----------------------------------------------------------------------------

    def choose(self, trouble: Trouble, *, depth: int = 1, tried: Sequence[int] = ()) -> list[int]:
        """Steps of the snapshots that may be restored for a trouble, the best first. Collective.

        Args:
            trouble: the trouble.
            depth: known-good checkpoint to begin with, 1 for the newest before the onset.
            tried: steps of the snapshots that were restored for it. Older ones are better.

        Raises:
            NoGoodCheckpoint: there is none, or none since the newest change of the model's
                structure.
            StoreError: the store cannot be read.
        """
        run, onset, saver = self.run, trouble.onset, self.run.saver
        saver.wait()
        saver.end_probation(before=onset)
        self.find_damage()
        if trouble.better_step is not None:
            onset, tried = trouble.better_step, ()
        initial, saves = [run.record.first_step], self.listed()
        if saver.started_from is not None:
            initial.append(saver.started_from)
        for change in run.record.changes[-1:]:
            # The run with the new structure begins with the first save after the change.
            saves = [each for each in saves if each.step > change.step and each.is_usable]
            initial += [each.step for each in saves[:1]]
        chosen = choose_checkpoints(
            saves,
            onset=onset,
            depth=depth,
            tried=tried,
            initial=initial,
            sound_until_onset=trouble.sound_before,
        )
        return [*chosen]

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
        run, engine = self.run, self.run.policy.engine
        live, rates = run.driver.engines(), run.driver.learning_rates()
        saved = self.load_first_intact(steps)
        own = saved.record
        own.healthy = run.record.healthy.with_better(own.healthy)

        # Hold.
        before = replace(run.holding.envelope, rates=rates_of(live))
        envelope = replace(chosen.envelope, rates={})
        at_fault: dict[str, float] = {}
        if chosen.limits_rate:
            at_fault = self._fault_rates(live, rates, own.healthy)
        engines = engines_after_rollback(engine, live, saved.engines)
        after = limit_rates(
            engine,
            with_rates(engines, chosen.envelope.rates),
            at_fault,
            run.driver.learning_rates(saved.engines),
            # No step has been trained at the rate of the very first state.
            healthy=saved.step > run.record.first_step or chosen.is_last,
            learnt=own.healthy,
        )
        lowest = min(
            after.scales,
            key=lambda name: (after.scales[name], name not in after.limits),
            default="",
        )

        # Rewind.
        new = envelope.beyond(before).left_out
        if trouble.exact:
            more = 0
        else:
            more = run.policy.rollback.skip_batches
        run.loaders.skip(new, more, before.beyond(envelope).left_out)
        obstacle = run.loaders.seek(saved.position)
        lost = self._lost_steps(saved.step, obstacle)
        if saved.data_state is not None:  # after the loaders, which draw random numbers
            run.data_state.set_random_states(saved.data_state)
        undone = run.progress.step - saved.step - lost - run.step_batches.steps_of(len({*new}))
        done = RollbackRecord(
            trouble=trouble,
            accepts=chosen.outcome is Outcome.ACCEPT,
            limits_rate=chosen.limits_rate,
            before=before,
            after=envelope,
            number=len(run.ledger.rollbacks) + 1,
            step=run.progress.step,
            checkpoint=saved.step,
            repeated=max(undone, 0),
            lost=lost,
            why_lost=obstacle.partition(": ")[0] if lost else "",
            rewind_obstacle=obstacle,
            lr=rates.get(lowest),
            lr_at_fault=at_fault.get(lowest),
            lr_limit=after.limits.get(lowest),
            lr_scale=after.scales.get(lowest, 1.0),
            lr_scale_before=run.metrics.lr_scale,
        )
        run.ledger.add_rollback(done)
        run.driver.load(None, after.engines)
        self._continue_from(saved, envelope)
        self._commit_rollback(done)
        return done

    def _fault_rates(self, live: Engines, rates: Rates, healthy: HealthyValues) -> dict[str, float]:
        """Engine name -> the rate in force that a ceiling answers.

        The highest rate since the last rollback if it was above every healthy one, else the present
        one; and the multiplier alone where the rate is unknown, or where the policy cuts the
        multiplier, whatever the rate is.
        """
        highest = self.run.journal.rates
        limits, at_fault = self.run.policy.engine.limits_lr, dict[str, float]()
        for name, each in live.items():
            scale = float(each["state"]["lr"]["scale"])
            if limits:
                rate = rates.get(name)
            else:
                rate = None
            if rate is None:
                at_fault[name] = scale
            else:
                at_fault[name] = rate * scale
            seen = highest.get(name)
            if limits and seen is not None and healthy.healthy_rate(name, seen) < seen:
                at_fault[name] = seen
        return broadcast(self.run.ranks, at_fault)

    def _lost_steps(self, target: int, obstacle: str) -> int:
        """Steps since `target` that the loop does not repeat, where the data was not rewound.

        A loop that counts steps takes as many steps as without the rollback, with later data.
        """
        if not obstacle or self.run.recovery.counts_steps or self.run.recovery.ends_by_steps:
            return 0
        newest_loader = obstacle == OTHER_LOADER
        if newest_loader:
            end = self.run.journal.loader_start
        else:
            end = self.run.progress.step
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
        self.run.saver.wait()
        with suppress(StateMismatch):  # a model that has changed its structure stays as it is
            saved = self._read(step)
            if self.run.driver.state_is_in_place:
                self.run.driver.load(saved.state, {})
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
        run = self.run
        try:
            saved = self.load_first_intact(steps)
        except StateMismatch as error:
            advice = _advice_for(newest)
            raise replace(error, where=run.store.place, advice=advice) from None
        own = saved.record
        run.record.continue_run(newest or own)
        run.loaders.resume_skipped(own.skipped)
        run.loaders.seek(saved.position)
        self._continue_from(saved, own.envelope, self._weights_of_anchors(saved))
        epochs = [each.epoch for each in run.record.changes]
        run.loaders.epoch_loop.changed_in = max(epochs, default=None)
        # Drops the changes that the restart has made: they are not the program's.
        run.driver.structure_changes()
        if own.last_regular is not None:
            run.schedule.last_regular = own.last_regular
        return saved.step, saved.data_state

    def _weights_of_anchors(self, saved: SavedCheckpoint) -> dict[int, Any]:
        """Step -> weights of that step, which a comparison needs, at a start.

        The other checkpoints are loaded for it, and then this one once more. A checkpoint that some
        rank cannot load is left out.
        """
        run, copies = self.run, dict[int, Any]()
        needed = {each.step for each in saved.record.comparisons.anchors}
        if not run.witness.is_enabled:
            return copies
        for step in sorted(needed - {saved.step}):
            try:
                self.load_step(step)
                copies[step] = run.driver.copy_weights()
            except Exception as error:
                problem = f"the weights of checkpoint {step} cannot be compared: {error}"
                run.log.event("problem", step=saved.step, problem=problem)
            if not all(run.ranks.gather(step in copies)):
                copies.pop(step, None)
        if needed:  # the reads have gone into the live arrays
            run.driver.load(self._read(saved.step).state, saved.engines)
        if saved.step in needed:
            copies[saved.step] = run.driver.copy_weights()
        return copies

    # -- an end ---------------------------------------------------------------------------------

    def before_next_start(self, onset: int) -> int | None:
        """Lets the next start begin before the trouble of a run that stops. Collective.

        It takes the oldest snapshot that was restored for the trouble. What was tried for it has
        not helped, so the start begins with what was held before, and with the budgets and rates of
        a new run. Without such a snapshot it takes the newest one before the trouble. If the record
        cannot be written, the log says so, because the run ends all the same.

        Args:
            onset: step at which the trouble begins.

        Returns:
            The step of the checkpoint, or None if the next start resumes from the newest one: where
            no snapshot is usable or on disk, or where a trainer saves.
        """
        run, before = self.run, None
        tries = run.ledger.same_trouble(onset, run.policy.rollback.probation)
        which = "the newest one before the trouble"
        steps = [each.checkpoint for each in tries]
        if tries:
            before = tries[0].before
            which = (
                "the oldest one that a rollback has restored; the rates, batches and values that "
                "the rollbacks have changed are undone"
            )
        try:
            run.saver.wait()
            if not tries:
                usable = [each.step for each in run.saver.listed() if each.is_usable]
                steps = [max((step for step in usable if step <= onset), default=-1)]
            saved = self.records().get(min(steps))
            if saved is None or run.store.trainer_save is not None or not run.store.durable:
                return None
            self._begin_next_start(saved, before)
        except (StoreError, OSError) as error:
            problem = f"the stop could not be written: {error}; a restart begins with the limits"
            run.log.problem(run.progress.step, f"{problem} and the skipped batches of today")
            return None
        run.log.info(
            f"the next start resumes from the checkpoint of step {saved.step}, {which}. Mend the "
            "program, and start it again"
        )
        return saved.step

    def _begin_next_start(self, saved: RunRecord, before: Envelope | None) -> None:
        """Begins an attempt at a checkpoint on disk only: a rollback that the next start completes.

        Args:
            saved: the record of the checkpoint.
            before: what was held before the tries of a run that stops, which are undone; or None.
        """
        run, now, step = self.run, self.run.record, saved.step
        record = now.at(saved)
        record.attempts = [*now.attempts, step]
        record.known_good_up_to = min(now.known_good_up_to, step)
        if before is not None:
            record.ledger.stop(step)
            read_again = saved.envelope.beyond(before).left_out
            for source, batches in saved.skipped.items():
                record.skipped[source] = [each for each in batches if each not in read_again]
            record.envelope = replace(before, rates={})
            record.engines = engines_of_new_start(run.policy.engine, saved.engines)
            record.comparisons.silent_until = 0
        run.store.replace_record(step, record.to_dict())


def _places(position: Mapping[str, Any] | None) -> dict[str, tuple[Any, ...]]:
    """Name of a source -> its kind, epoch and batch, to compare the places of several ranks."""
    if position is None:
        sources = {}
    else:
        sources = position["sources"]
    return {name: (at["kind"], at["epoch"], at["index"]) for name, at in sources.items()}


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
