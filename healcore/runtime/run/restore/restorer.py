"""`Restorer`: restores checkpoints, for a rollback and for a start alike.

All checks pass before live state changes. A rollback loads its target, and then replaces the record
of the target by one rename. A process that is killed before the rename has changed nothing on disk,
and its successor finds the trouble again. After the rename every start resumes from the target.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from healcore.console import counted, first_of
from healcore.core.decision import Cause
from healcore.runtime.data.loader_adapters import position_of_other_ranks
from healcore.runtime.driver import Engines, Rates
from healcore.runtime.faults.failures import classify
from healcore.runtime.run.compare.evidence import ComparisonState
from healcore.runtime.run.engine_states import (
    compatible_states,
    engines_after_rollback,
    limit_norms,
    with_lr_states,
)
from healcore.runtime.run.healthy_ranges import Held
from healcore.runtime.run.host_state import HOST_ITEM, HostParts
from healcore.runtime.run.orders import Order, RollbackRecord
from healcore.runtime.run.rollback.dead_run import Attempt, attempts_at
from healcore.runtime.run.rollback.next_trial import Trial
from healcore.runtime.run.rollback.rates import limit_rates
from healcore.runtime.run.run_record import RunRecord
from healcore.runtime.store.checkpoints import (
    CheckpointDamaged,
    CheckpointInfo,
    CheckpointNotFound,
    NoGoodCheckpoint,
    Restored,
    StateMismatch,
    StoreError,
    choose_checkpoints,
)
from healcore.runtime.store.host_copy import MEMORY
from healcore.runtime.store.ranks import RankFailed, broadcast, run_on_each, run_on_first
from healcore.runtime.store.values import attribute

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

T = TypeVar("T")
MODEL_CHANGED_SINCE = "the program has changed the structure of its model since"
"""Reason of a rollback that restores weights, and not the place in the run."""


class _Checkpoint(NamedTuple):
    """The content of a checkpoint, after its checks and before any use."""

    step: int
    state: dict[str, Any]
    record: RunRecord | None  # None if another program has saved it
    engines: dict[str, Any]  # engine states that fit this policy
    problem: str  # of the other engine states, or an empty string
    host: HostParts | None

    @property
    def position(self) -> dict[str, Any] | None:
        """Positions of the loaders, or None."""
        return None if self.host is None else self.host.data


class Restorer:
    """Restores checkpoints, for rollbacks and after a start."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def restore(
        self, order: Order, lost_steps: Callable[[int, str], int] = lambda target, why_not: 0
    ) -> RollbackRecord:
        """Restores a checkpoint for an order.

        `lost_steps` takes the restored step, and why the data were not rewound or "". It returns
        the number of undone steps that the run does not repeat.

        Raises NoGoodCheckpoint if no checkpoint is usable (a failed load may have changed a part of
        the live state), StateMismatch if the state differs, or another StoreError.
        """
        saver = self.run.saver
        saver.wait()
        self.run.known.end_probation(before=order.onset)
        self.find_damage()
        steps = self._choose(order)
        live, rates = self.run.driver.engines(), self.run.driver.learning_rates()
        order = replace(order, lr_at_fault=self._fault_rates(order, live, rates))
        load = partial(self._load_target, order, live, rates)
        try:
            done, saved = self._load_first_fitting(order, steps, load)
        except StateMismatch as mismatch:
            if order.better_step is not None or order.attempt:
                raise  # the weights are finite: what fits only in part is no remedy
            return self._restore_common(order, steps, mismatch)
        extra = self.run.policy.rollback.skip_batches
        why_not = self.run.loaders.rewind(saved.position, order.batches, extra, order.read_again)
        done = self._with_repeat(done, lost_steps(done.target, why_not), why_not)
        self.run.ledger.on_rollback(done, saved.record and saved.record.ledger)
        if saved.host is not None:  # after the loaders, which draw random numbers
            self.run.data.host.put_back(saved.host)
        self.run.comparisons.held = self._held_after(order)
        self.run.comparisons.on_rollback(done.target)
        self.run.record.monitor.on_rollback(done.target)
        self.run.record.part_growth.on_rollback(done.target)
        self._forget_changes(since=done.target)
        saver.begin_attempt(done.target)
        self._commit_rollback(done)
        return done

    def _load_first_fitting(
        self, order: Order, steps: Sequence[int], load: Callable[[_Checkpoint], T]
    ) -> tuple[T, _Checkpoint]:
        """Calls `load` with the first intact checkpoint of `steps` that fits the live state.

        If the best one is from before a change of the model's structure, checkpoints from after the
        change are tried before older ones. Raises StateMismatch of the best one if none fits.
        """
        mismatch: StateMismatch | None = None
        remaining = [*steps]
        while remaining:
            try:
                return self._load_first_intact(remaining, load, self.run.data.step)
            except StateMismatch as error:
                if error.step is None or error.step not in remaining:
                    raise
                older = remaining[remaining.index(error.step) + 1 :]
                newer = () if mismatch else self._after_change(order, error.step)
                remaining = [*newer, *older]
                mismatch = mismatch or error
            except NoGoodCheckpoint:
                if mismatch is None:
                    raise
                break
        assert mismatch is not None
        raise mismatch

    def _after_change(self, order: Order, change: int) -> list[int]:
        """Steps of the finite checkpoints that are newer than `change`, the best first.

        The newest one up to the onset; then, as a last resort, the oldest one after the onset,
        whose arrays are finite at least. Without those that were tried for the same trouble.
        """
        past = self.run.ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        tried = {each.checkpoint for each in past}
        usable = [
            each.step
            for each in self.saves()
            if each.finite and each.status != "abandoned" and each.step > change
        ]
        fresh = sorted(step for step in usable if step not in tried)
        before = [step for step in fresh if step <= order.onset]
        return [*reversed(before), *(step for step in fresh if step > order.onset)]

    def _restore_common(
        self, order: Order, steps: Sequence[int], mismatch: StateMismatch
    ) -> RollbackRecord:
        """Restores what a checkpoint has in common with a model whose structure has changed since.

        The run keeps its place. At an earlier place the program would change its model once more,
        which may do harm or raise. So only weights and moments go back. Raises `mismatch` if no
        checkpoint has enough in common.
        """
        driver, saver, step = self.run.driver, self.run.saver, self.run.data.step
        live = driver.engines()
        found = None
        for each in steps if self.run.ranks.world == 1 else ():
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
            **vars(order),
            number=len(self.run.ledger.rollbacks) + 1,
            step=step,
            target=step,
            weights_of=found,
            lost=step - found,
            why_lost=MODEL_CHANGED_SINCE,
            why_forward=MODEL_CHANGED_SINCE,
        )
        self.run.ledger.on_rollback(done, None)
        self.run.comparisons.on_rollback(step)
        self.run.record.monitor.on_rollback(step)
        self.run.comparisons.on_structure_change()
        saver.begin_attempt(step)
        saver.write(step, "rollback")
        return done

    def _forget_changes(self, *, since: int) -> None:
        """Forgets the program's changes of the model in steps that are undone."""
        record = self.run.record
        record.changes = [each for each in record.changes if each.step < since]
        self.run.loaders.changed_in = max((each.epoch for each in record.changes), default=-1)

    def _choose(self, order: Order) -> tuple[int, ...]:
        """Steps of the checkpoints to try, the best first."""
        if order.better_step is not None:
            return choose_checkpoints(self.saves(), onset=order.better_step, sound_until_onset=True)
        ledger = self.run.ledger
        past = ledger.same_trouble(order.onset, self.run.policy.rollback.region)
        if order.attempt:
            past = attempts_at(order.onset, ledger.rollbacks)
        return choose_checkpoints(
            self.saves(),
            onset=order.onset,
            depth=order.depth,
            tried=[each.checkpoint for each in past],
            initial=(self.run.record.first_step, self.run.known.started_from),
            sound_until_onset=order.sound_until_onset,
        )

    def _fault_rates(self, order: Order, live: Engines, rates: Rates) -> Mapping[str, float] | None:
        """`lr_at_fault` of the order, completed by the rates in force of the other optimizers."""
        if order.lr_at_fault is None:
            return None
        engine = self.run.policy.engine
        scales = {name: float(engine.from_dict(each).lr.scale) for name, each in live.items()}
        given = {name: rate for name, rate in rates.items() if rate is not None}
        return {n: given.get(n, 1.0) * scale for n, scale in scales.items()} | {**order.lr_at_fault}

    def _load_target(
        self, order: Order, live: Engines, rates: Rates, saved: _Checkpoint
    ) -> RollbackRecord:
        """Loads the target of a rollback, with the engine states and rates that follow it."""
        engine = self.run.policy.engine
        engines = engines_after_rollback(engine, live, saved.engines)
        if order.trial == Trial.ACCEPT or order.attempt == Attempt.UNDO:
            engines = with_lr_states(engines, order.lr_states)
        self._load_state(saved.state, engines, reset=self.run.policy.rollback.reset_moments)
        now = self.run.driver.learning_rates()  # the schedules are at the restored step
        # No step has been trained at the rate of the very first state: it may be the start of a
        # warm-up, so it limits only the last rollback that the budget allows.
        trained = saved.step > self.run.record.first_step or order.is_last
        engines, limits, scales = limit_rates(
            engine,
            engines,
            order.lr_at_fault,
            now,
            healthy=trained,
            learnt=self.run.comparisons.state.ranges.values,
        )
        held = self._held_after(order)
        engines = limit_norms(
            engine, engines, held.norm_limits, withhold=held.withholds(saved.step)
        )
        lowest = min(scales, key=lambda n: (scales[n], n not in limits), default="")
        self.run.driver.load(None, engines)
        self.run.driver.hold_numbers(held.number_ranges)
        return RollbackRecord(
            **vars(order),
            number=len(self.run.ledger.rollbacks) + 1,
            step=self.run.data.step,
            target=saved.step,
            skipped=len(order.batches),
            engine=lowest,
            lr=rates.get(lowest),
            lr_limit=limits.get(lowest),
            lr_scale=scales.get(lowest, 1.0),
        )

    def _with_repeat(self, done: RollbackRecord, lost: int, why_not: str) -> RollbackRecord:
        """The record of a rollback with the numbers of repeated and of lost steps."""
        skipped = self.run.data.steps_of(len({*done.batches}))
        why, _, _ = why_not.partition(": ")  # without the advice
        repeated = max(done.step - done.target - lost - skipped, 0)
        why_lost = why if lost else ""
        return replace(done, repeated=repeated, lost=lost, why_lost=why_lost, why_forward=why_not)

    def _held_after(self, order: Order) -> Held:
        """What is held in its healthy range after the rollback of an order."""
        return self.run.comparisons.held if order.held is None else order.held

    def _commit_rollback(self, done: RollbackRecord) -> None:
        """Replaces the record of the restored checkpoint, and saves it if it is not on disk."""
        saver, step = self.run.saver, done.target
        try:
            saver.replace_record(step)
            on_disk = self.run.store.steps_on_disk
            if self.run.store.durable and step not in run_on_first(self.run.ranks, on_disk):
                saver.write(step, "rollback")
        except (StoreError, OSError) as error:
            problem = f"the rollback could not be written: {error}; a restart before the next save"
            self.run.log.problem(done.step, f"{problem} does it again")
        saver.report_failures()

    def newest_record(self) -> RunRecord | None:
        """The newest record in the store, or None. Reads no arrays."""
        found: list[RunRecord] = []
        stored = self.run.store.records() if self.run.ranks.rank == 0 else {}
        for each in broadcast(self.run.ranks, stored).values():
            with suppress(Exception):  # the resume reports a malformed record
                found.append(RunRecord.of(each))
        return max(found, key=lambda each: (len(each.attempts), each.step), default=None)

    def resume(self, newest: RunRecord | None, steps: list[int]) -> tuple[int, HostParts | None]:
        """Resumes from the first intact checkpoint of `steps`, in descending order.

        `newest` is the newest record. Returns the step, and the argument of `HostState.put_back`
        for when the loop has a loader.

        Raises NoGoodCheckpoint without an intact checkpoint, and StateMismatch for another state:
        an older checkpoint that fits would lose the steps since then.
        """

        def load(saved: _Checkpoint) -> RunRecord:
            own = saved.record or RunRecord(first_step=saved.step, step=saved.step)
            weights = self._copies(own.comparisons, saved.step)
            repeats, reset = own.repeats(saved.step), self.run.policy.rollback.reset_moments
            comparisons, engines = self.run.comparisons, saved.engines
            if not comparisons.is_enabled:
                engines = limit_norms(self.run.policy.engine, engines, {})
            self._load_state(saved.state, engines, reset=reset and repeats)
            if own.comparisons is not None:
                if comparisons.is_enabled and saved.step in own.comparisons.needed():
                    weights[saved.step] = self.run.driver.copy_weights()
                batches = None if saved.host is None else saved.host.batches
                at = saved.step
                comparisons.continue_from(own.comparisons, weights, step=at, batches=batches)
            self.run.ledger.continue_from(own.ledger, saved.step)
            vars(self.run.record.monitor).update(vars(own.monitor))
            # Loaders that the rollback did not rewind keep their positions.
            forward = own.forward if repeats else {}
            places = saved.position or {}
            worlds = [each["ranks"] for each in _places(places).values() if "ranks" in each]
            if worlds:
                moved = position_of_other_ranks
                forward = {name: moved(each, worlds[0]) for name, each in forward.items()}
            self.run.loaders.resume({**places, **forward}, own.skipped)
            return own

        self._add_param_groups(steps)
        try:
            own, saved = self._load_first_intact(steps, load)
        except StateMismatch as error:
            where = self.run.store.place
            raise replace(error, where=where, advice=_advice_for(newest)) from None
        record = self.run.record
        live = {"ledger": record.ledger, "monitor": record.monitor}
        vars(record).update(vars(newest or own), completed=False, **live)
        record.part_growth.on_rollback(own.step)
        self._forget_changes(since=own.step)
        self.run.driver.structure_changes()  # those of the restart itself
        self.run.saver.begin_attempt(own.step)
        return own.step, saved.host

    def _add_param_groups(self, steps: Sequence[int]) -> None:
        """Adds the parameter groups of the newest checkpoint that the program has not added yet."""
        stored = self.run.store.records() if self.run.ranks.rank == 0 else {}
        stored = broadcast(self.run.ranks, stored.get(max(steps, default=-1), {}))
        groups: dict[str, list[list[str]]] = {}
        with suppress(Exception):  # the resume reports a malformed record
            groups = RunRecord.of(stored).param_groups
        added = self.run.driver.add_param_groups(groups) if groups else []
        if added:
            self.run.log.info(
                f"the optimizer has received {counted(len(added), 'parameter')} that the run had "
                f"added with add_param_group: {first_of(added)}. A call for the same parameters "
                "finds the group there"
            )

    def load_state_of(self, step: int) -> None:
        """Loads the user's state of a checkpoint, without healcore's record."""
        reset = self.run.policy.rollback.reset_moments and self.run.record.repeats(step)
        self._load_state(
            self.run.store.restore(step, self.run.saver.items()).state, {}, reset=reset
        )

    def restore_again(self, step: int) -> None:
        """Restores the checkpoint of the last rollback once more, before any further step.

        In JAX a pytree is not replaced: the program cannot have changed it, and may hold it.
        """
        driver = self.run.driver
        engines = driver.engines()
        reset = self.run.policy.rollback.reset_moments and self.run.record.repeats(step)

        def load(saved: _Checkpoint) -> bool:
            if driver.state_is_in_place:
                self._load_state(saved.state, engines, reset=reset)
            return driver.state_is_in_place

        self.run.saver.wait()
        try:
            _, saved = self._load_first_intact([step], load)
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
            self.run.data.repeat_pass(saved.host)

    def _copies(self, saved: ComparisonState | None, resumed: int) -> dict[int, Any]:
        """The weights of older checkpoints that a comparison needs, by step; changes live state.

        A checkpoint that some rank cannot load is left out. The resumed one is not affected.
        """
        copies: dict[int, Any] = {}
        if saved is None or not self.run.comparisons.is_enabled:
            return copies
        for step in [each for each in saved.needed() if each < resumed]:
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

    def saves(self) -> list[CheckpointInfo]:
        """The checkpoints that every rank lists, as rank 0 sees them."""
        listed = self.run.ranks.gather(self.run.known.listed())
        common = set.intersection(*({saved.step for saved in saves} for saves in listed))
        return [saved for saved in listed[0] if saved.step in common]

    def find_damage(self) -> None:
        """Reports checkpoints that are too damaged for a listing."""
        damaged = []
        with suppress(StoreError):  # a missing disk is reported where it is needed
            damaged = self.run.store.damaged()
        for error in broadcast(self.run.ranks, damaged):
            self.run.known.report_damage(error)

    def _load_first_intact(
        self, steps: Sequence[int], load: Callable[[_Checkpoint], T], now: int | None = None
    ) -> tuple[T, _Checkpoint]:
        """Calls `load` with the first checkpoint that all ranks can load.

        A checkpoint with intact digests counts as damaged if its values cannot be loaded. If no
        checkpoint can be loaded, a part of the live state may have changed. `now` is the step of a
        rollback.
        """
        problems: list[str] = []

        def damaged(error: CheckpointDamaged) -> None:
            problems.append(str(error))
            self.run.known.report_damage(error)

        for step in steps:
            restored = None
            try:
                restored = self.run.store.restore(step, self.run.saver.items())
            except CheckpointNotFound:
                pass
            except CheckpointDamaged as error:
                damaged(error)
            # The ranks' copies in memory may differ.
            if not all(self.run.ranks.gather(restored is not None)):
                continue
            assert restored is not None
            loaded = self._load_on_all_ranks(step, restored, load)
            if isinstance(loaded, tuple):
                if problem := loaded[1].problem:
                    at = step if now is None else now
                    self.run.log.event("problem", step=at, problem=problem)
                return loaded
            why = f"{type(loaded).__name__}: {' '.join(str(loaded).split())[:200]}"
            path = next((s.path for s in self.saves() if s.step == step), None) or MEMORY
            text = f"holds values that healcore does not write ({why})"
            damaged(CheckpointDamaged(step, path, "its content", text))
        reasons = "; ".join(problems) or "none of them is on every rank"
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(steps)} can be restored: {reasons}")

    def _load_on_all_ranks(
        self, step: int, restored: Restored, load: Callable[[_Checkpoint], T]
    ) -> tuple[T, _Checkpoint] | Exception:
        """Calls `load`, or returns the error of a rank whose values are damaged. Collective.

        Raises the error if the state does not fit or memory is exhausted on a rank.
        """
        saved = loaded = failure = None
        try:
            saved = run_on_each(self.run.ranks, partial(self._checked, step, restored))
            saved = self._adapt_to_world(saved)
            loaded = load(saved)
        except Exception as error:
            failure = error
        if isinstance(failure, StateMismatch) and failure.step is None:
            failure = StateMismatch(step, failure.differences)
        cause = failure and classify(failure).cause
        ends = isinstance(failure, StateMismatch) or cause is Cause.OOM
        outcomes = self.run.ranks.gather(None if failure is None else ends)
        if loaded is not None and saved is not None and outcomes.count(None) == len(outcomes):
            return loaded, saved
        failure = failure or RankFailed("another rank cannot load it")
        if any(outcomes):
            raise failure
        return failure

    def _checked(self, step: int, restored: Restored) -> _Checkpoint:
        """Checks healcore's part of a checkpoint. Malformed values raise any exception."""
        record = None if restored.record is None else RunRecord.of(restored.record)
        host = self.run.data.host.read(restored.state.get(HOST_ITEM))
        if record is not None:
            if record.step != step:
                raise StoreError(f"its record is of step {record.step}")
            if host is None and record.world == self.run.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
            self.run.loaders.check(record.forward)
        stored = record.engines if record else {}
        engines, problem = compatible_states(self.run.policy.engine, stored)
        saved = _Checkpoint(step, restored.state, record, engines, problem, host)
        self.run.loaders.check(saved.position or {})
        return saved

    def _load_state(self, saved: Mapping[str, Any], engines: Any, *, reset: bool) -> None:
        state = {name: each for name, each in saved.items() if name != HOST_ITEM}
        self.run.driver.load(state, engines, reset_moments=reset)

    def _adapt_to_world(self, saved: _Checkpoint) -> _Checkpoint:
        """Adapts this rank's part if the number of ranks has changed: all continue as rank 0.

        Random generators stay as the program has set them: added ranks have no saved state.
        """
        world = self.run.ranks.world
        saved_by = world if saved.record is None else saved.record.world
        if saved_by == world:
            return saved
        parts = self.run.ranks.gather(saved.position)
        wrong = [
            f'"{name}" was saved in {saved_by} parts, one for each rank, but the number of ranks '
            f"is {world} now"
            for name, item in self.run.driver.state().items()
            if attribute(item, "per_rank")
        ]
        first, *others = [
            {name: (each["kind"], each["epoch"], each["index"]) for name, each in at.items()}
            for at in map(_places, parts[:saved_by])
        ]
        if any(each != first for each in others):
            wrong.append(f"its {saved_by} ranks were at different batches of their loaders")
        if wrong:
            raise StateMismatch(saved.step, wrong)
        self.run.log.problem(
            saved.step,
            f"checkpoint {saved.step} was saved by {saved_by} ranks, but this run has {world}: the "
            "saved random generators are not used; the loaders begin the epoch again and discard "
            "the batches before the checkpoint",
        )
        if parts[0] is None:
            return saved._replace(host=None)
        moved = {n: position_of_other_ranks(at, saved_by) for n, at in _places(parts[0]).items()}
        return saved._replace(host=HostParts(None, None, None, {}, {**parts[0], **moved}, {}))


def _advice_for(newest: RunRecord | None) -> str:
    """What to do about a checkpoint that does not fit, if the program has changed its model."""
    changes = [] if newest is None else newest.changes
    if not changes:
        return ""
    which = ", ".join(f"at step {each.step} (epoch {each.epoch})" for each in changes[-3:])
    return (
        f"The program has changed the structure of its model while it trained, {which}. Make the "
        "same changes before `with Healer(...)`, and not again in the loop; "
        'docs/data-and-resume.md shows it under "A model that changes while it trains"'
    )


def _places(position: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Number of a loader -> its position, without the counts of all loaders."""
    return {n: each for n, each in (position or {}).items() if isinstance(each, Mapping)}
