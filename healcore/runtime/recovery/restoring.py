"""`Restorer`: rolls back, and resumes from a checkpoint after a start, with a journal.

All checks pass before live state changes. A start after a crash carries out the same plan again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from healcore.core.engine import StateError
from healcore.runtime.checkpoints.host_state import ITEM, HostParts, HostState
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import position as positions
from healcore.runtime.data.loader_registry import LoaderRegistry, RewindResult
from healcore.runtime.data.position import DataError
from healcore.runtime.dominance.dominance import Dominance
from healcore.runtime.dominance.saved import SavedComparisons
from healcore.runtime.dominance.saved import read as read_comparisons
from healcore.runtime.driver import Driver, check_engines
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Rollback, Status
from healcore.runtime.recovery.checkpoint_choice import (
    CheckpointChoice,
    choose,
    common_to_ranks,
    newest_until,
    saved_after,
)
from healcore.runtime.recovery.engine_states import (
    after_rollback,
    apply_rate,
    compatible,
    limited,
    with_lr_states,
)
from healcore.runtime.recovery.journal import (
    Journal,
    JournalError,
    directories,
    update_from_disk,
)
from healcore.runtime.recovery.trials import Trial
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import (
    CheckpointDamaged,
    NoGoodCheckpoint,
    RestoreResult,
    Saved,
    StateMismatch,
    StoreError,
    restore_first_intact,
)
from healcore.runtime.store.errors import Untrusted
from healcore.runtime.store.memory import WHERE
from healcore.runtime.store.ranks import RankFailed, Ranks, agreed, on_each
from healcore.runtime.store.structure import attribute

T = TypeVar("T")
HEALING_SCHEMA = 2
"""Version of healcore's part of a checkpoint, see `Restorer.contents`."""


class _Content(NamedTuple):
    """Healcore's part of a checkpoint, after its checks and before any use."""

    engines: dict[str, Any]
    """Engine states that fit this policy."""
    problem: str
    """Problem of the other engine states, or an empty string."""
    ledger: Ledger | None
    host: HostParts | None
    comparisons: SavedComparisons | None


@dataclass(eq=False, kw_only=True)
class Restorer:
    """Restores checkpoints, for rollbacks and after a start."""

    policy: HostPolicy
    driver: Driver
    checkpoints: CheckpointManager
    journal: Journal
    ledger: Ledger
    loaders: LoaderRegistry
    host: HostState
    ranks: Ranks
    log: RunLog
    started_from: int | None = field(default=None, init=False)
    """Step of the snapshot or checkpoint that this process started from, or None before."""
    damage: list[CheckpointDamaged] = field(default_factory=list, init=False)
    """Errors of damaged checkpoints, as this process has found them."""
    dominance: Dominance | None = field(default=None, init=False)
    """The comparisons of weights, whose state is saved."""
    journal_outdated: bool = field(default=False, init=False)
    """Whether the last write of the journal failed; the next save tries again."""

    def contents(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state to save after `step` steps, and healcore's part of the checkpoint."""
        healing = {
            "schema": HEALING_SCHEMA,
            "lineage": self.journal.state.lineage,
            "step": step,
            "world": self.ranks.world,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }
        if self.dominance is not None and self.dominance.is_enabled:
            healing["comparisons"] = self.dominance.saved().to_dict()
        return self._items(), healing

    def _items(self) -> dict[str, Any]:
        return {**self.driver.items(), ITEM: self.host}

    # -- rollback -------------------------------------------------------------------------------

    def apply(self, rollback: Rollback, step: int) -> RewindResult:
        """Carries out an order after `step` steps. A StoreError declines the order.

        Raises NoGoodCheckpoint without a usable checkpoint, and StateMismatch if the checkpoints
        are of another state; the live state is then unchanged.
        """
        self.checkpoints.wait()
        self.checkpoints.verify_due(self.ledger, before=rollback.onset)
        self.find_damage()
        last = self.journal.state.rollback
        try:
            self._make_plan(rollback, step)
            host = self._apply_plan(rollback, now=step)
        except StoreError:
            rollback.status, self.journal.state.rollback = Status.DECLINED, last
            self.write_journal(step)  # so that the next start does not carry out the plan
            raise
        moved = self.loaders.rewind(
            _position(host), rollback.batches, self._extra_skips(rollback), rollback.read_again
        )
        if host is not None:  # after the loaders, which draw random numbers
            self.host.put_back(host)
        self._record_applied(rollback)
        return moved

    def _make_plan(self, rollback: Rollback, step: int) -> None:
        """Completes an order to a plan, and writes the plan to the journal."""
        saves = self.saves()
        tried = [
            each.target for each in self.ledger.same_trouble(rollback.onset, self.policy.region)
        ]
        choice = self._choose(saves, rollback, tried)
        rollback.initial, rollback.repeated = choice.initial, choice.repeated
        rollback.candidates = list(choice.order)
        newer = {*saved_after(saves, onset=rollback.onset), *_steps_after(saves, choice.order[0])}
        rollback.quarantine = sorted(newer - {*choice.order})
        rollback.number, rollback.step = self.journal.state.rollbacks + 1, step
        rollback.engines = self.driver.healing()
        rollback.lr = self.driver.learning_rate()
        rollback.skipped = len(rollback.batches)
        rollback.left_out = self.loaders.left_out(
            rollback.batches, self._extra_skips(rollback), rollback.read_again
        )
        rollback.forward = self.loaders.forward_positions()
        if rollback.lr_at_fault is not None and not math.isfinite(rollback.lr_at_fault):
            rollback.lr_at_fault = self._rate_in_force(rollback)
        rollback.status = Status.PLANNED
        self.journal.state.rollback, self.journal.state.ledger = rollback, self.ledger.to_dict()
        self.journal.state.quarantined += directories(saves, rollback.quarantine)
        self.write_journal(step)
        self.log.event(
            "rollback_begin",
            step=step,
            number=rollback.number,
            onset=rollback.onset,
            checkpoint=choice.order[0],
        )

    def _extra_skips(self, rollback: Rollback) -> int:
        """Number of batches to skip after the bad batches."""
        return self.policy.skip_batches if rollback.batches else 0

    def _choose(
        self, saves: Sequence[Saved], rollback: Rollback, tried: Sequence[int]
    ) -> CheckpointChoice:
        if rollback.better is not None:
            return newest_until(saves, rollback.better)
        initial = self.journal.state.first_step, self.started_from
        return choose(
            saves,
            onset=rollback.onset,
            depth=rollback.depth,
            tried=tried,
            initial=[step for step in initial if step is not None],
            exact=rollback.exact,
        )

    def _rate_in_force(self, rollback: Rollback) -> float:
        """The learning rate in force at the plan; the multiplier alone if the rate is unknown."""
        engine = self.policy.engine
        scales = [engine.from_dict(each).lr.scale for each in rollback.engines.values()]
        rate = 1.0 if rollback.lr is None else rollback.lr
        return rate * float(min(scales, default=1.0))

    def _apply_plan(self, plan: Rollback, *, now: int) -> HostParts | None:
        """Quarantines, restores and loads. Repeating it has the same result."""
        engine = self.policy.engine

        def load(result: RestoreResult, saved: _Content) -> tuple[HostParts | None, dict[str, Any]]:
            engines = after_rollback(engine, plan.engines, saved.engines)
            if plan.trial == Trial.ACCEPT:
                engines = with_lr_states(engines, plan.lr_states)
            host = self._load_state(result, saved, engines, reset=self.policy.reset_moments)
            rate = self.driver.learning_rate()  # the schedule is at the restored step
            if plan.lr_at_fault is not None:
                # No step has been trained at the rate of the very first state.
                trained = result.step > (self.journal.state.first_step or 0)
                engines = limited(engine, engines, plan.lr_at_fault, rate, healthy=trained)
            engines, limit, scale = apply_rate(engine, engines, rate)
            self.driver.load_healing(engines)
            applied = {"engines": engines, "lr_limit": limit, "lr_scale": scale}
            return host, {"target": result.step, **applied}

        self.checkpoints.quarantine(plan.quarantine, now=now)
        (host, applied), saved = self._load_first_intact(plan.candidates, load, now)
        for name, value in applied.items():
            setattr(plan, name, value)
        self.checkpoints.quarantine(_steps_after(self.saves(), plan.target), now=now)
        self.checkpoints.abandon(plan.target)
        self.ledger.on_rollback(plan, saved.ledger)
        plan.status = Status.APPLIED
        return host

    def _record_applied(self, plan: Rollback) -> None:
        """Writes an applied plan to the journal, which keeps it until the next save."""
        state = self.journal.state
        state.rollbacks, state.ledger = plan.number, self.ledger.to_dict()
        self.write_journal(plan.target)
        self.checkpoints.reload()

    # -- after a start --------------------------------------------------------------------------

    def finish(self, plan: Rollback) -> HostParts | None:
        """Finishes the plan of a killed process. Raises JournalError if the plan is malformed."""
        try:
            self.loaders.check(plan.forward)
            check_engines(plan.engines, self.driver.healing())
            for each in plan.engines.values():
                self.policy.engine.from_dict(each)
        except (DataError, StateError) as error:
            raise self.journal.malformed() from error
        if self.journal.state.ledger is not None:
            ledger = Ledger.from_dict(self.journal.state.ledger)
            self.ledger.continue_from(ledger, plan.candidates[0], None)
        host = self._apply_plan(plan, now=plan.step)
        self.loaders.resume(_with(host, plan.forward), plan.left_out)
        self._record_applied(plan)
        return host

    def resume(self, order: Sequence[int]) -> tuple[int, HostParts | None]:
        """Resumes from the first intact checkpoint of `order`, steps in descending order.

        Returns the step, and the argument of `HostState.put_back` for when the loop has a loader.
        Raises NoGoodCheckpoint without an intact checkpoint, and StateMismatch for another state:
        an older checkpoint that fits would lose the steps since then.
        """
        last, live = self.journal.state.rollback, {}
        if last is not None:
            live, _ = compatible(self.policy.engine, last.engines)
            try:
                self.loaders.check(last.forward)
                check_engines(live, self.driver.healing())
            except (DataError, StateError) as error:
                raise self.journal.malformed() from error

        def load(result: RestoreResult, saved: _Content) -> tuple[int, HostParts | None]:
            engines, reset = saved.engines, False
            if last is not None and result.step <= last.target:
                # No checkpoint after the last rollback: killed before its save, or it is damaged.
                older = result.step < last.target
                engine = self.policy.engine
                engines = after_rollback(engine, live, engines, counted=True) if older else live
                reset = self.policy.reset_moments
            weights = self._copies(saved.comparisons, result.step)
            loaded = self._load_state(result, saved, engines, reset=reset)
            if self.dominance is not None and saved.comparisons is not None:
                self.dominance.continue_from(saved.comparisons, weights)
                if last is not None and result.step <= last.target:
                    self.dominance.on_rollback(result.step)
            return result.step, loaded

        try:
            (step, host_state), saved = self._load_first_intact(order, load)
        except StateMismatch as error:
            where = "" if self.journal.path is None else str(self.journal.path.parent)
            raise replace(error, where=where) from None
        ledger, forward = saved.ledger, {}
        if last is not None and step <= last.target:
            of_journal, forward = self.journal.state.ledger, last.forward
            ledger = None if of_journal is None else Ledger.from_dict(of_journal)
        if ledger is not None:
            self.ledger.continue_from(ledger, step, saved.ledger)
        else:
            self.ledger.next_step = step
        self.loaders.resume(_with(host_state, forward), {} if last is None else last.left_out)
        return step, host_state

    def _copies(self, saved: SavedComparisons | None, resumed: int) -> dict[int, Any]:
        """The weights of older checkpoints that a comparison needs, by step; changes live state.

        A checkpoint that some rank cannot load is left out: it is no damage of the resumed one.
        """
        copies: dict[int, Any] = {}
        if saved is None or self.dominance is None or not self.dominance.is_enabled:
            return copies
        for step in saved.needed():
            if step >= resumed:
                continue
            weights = None
            try:
                state = self._restore([step]).restored.state
                self.driver.replace({name: each for name, each in state.items() if name != ITEM})
                weights = self.driver.copy_weights()
            except Exception as error:
                problem = f"the weights of checkpoint {step} cannot be compared: {error}"
                self.log.event("problem", step=resumed, problem=problem)
            if all(self.ranks.gather(weights is not None)):
                copies[step] = weights
        return copies

    def saves(self) -> list[Saved]:
        """The checkpoints that every rank has."""
        listed = self.checkpoints.listed()
        return listed if self.ranks.world == 1 else common_to_ranks(self.ranks.gather(listed))

    def find_damage(self) -> None:
        """Reports checkpoints that are too damaged for a listing."""
        damaged = []
        with suppress(StoreError):  # a missing disk is reported where it is needed
            damaged = self.checkpoints.store.damaged()
        known = {(error.path, error.file) for error in self.damage}
        for error in agreed(self.ranks, damaged):
            if (error.path, error.file) not in known:
                self._log_damage(error)

    def _log_damage(self, error: CheckpointDamaged) -> None:
        self.damage.append(error)
        self.checkpoints.log_damage(error)

    def _load_first_intact(
        self, order: Sequence[int], load: Callable[[RestoreResult, _Content], T], now: int = -1
    ) -> tuple[T, _Content]:
        """Returns the result of `load` for the first checkpoint that all ranks can load.

        A checkpoint with intact digests counts as damaged if loading its values raises. The live
        state may be changed in part only if no checkpoint can be loaded.
        """
        left, problem = list(order), "there is none"
        while left:
            result = self._restore(left)
            loaded = failure = None
            try:
                saved = on_each(self.ranks, lambda each=result: self._checked_content(each))
                loaded = load(result, saved), saved
            except Exception as error:
                failure = error
            if isinstance(failure, StateMismatch) and failure.step is None:
                failure = StateMismatch(result.step, failure.differences)
            ends = isinstance(failure, (StateMismatch, JournalError, Untrusted, MemoryError))
            outcomes = self.ranks.gather(None if failure is None else ends)
            if loaded is not None and not any(each is not None for each in outcomes):
                if loaded[1].problem:
                    step = result.step if now < 0 else now
                    self.log.event("problem", step=step, problem=loaded[1].problem)
                return loaded
            failure = failure or RankFailed("another rank cannot load it")
            if any(outcomes):
                raise failure
            problem = f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"
            path = next((s.path for s in self.saves() if s.step == result.step), None) or WHERE
            text = f"holds values that healcore does not write ({problem})"
            self._log_damage(
                CheckpointDamaged(result.step, path, "its content", text, malformed=True)
            )
            left = left[left.index(result.step) + 1 :]
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(order)} can be loaded: {problem}")

    def _restore(self, order: Sequence[int]) -> RestoreResult:
        """Reads the first checkpoint that is intact on every rank; copies in memory may differ."""
        store, like = self.checkpoints.store, self._items()
        if self.ranks.world == 1:
            return restore_first_intact(store, order, like, self._log_damage)
        for step in order:
            result = None
            with suppress(NoGoodCheckpoint):
                result = restore_first_intact(store, [step], like, self._log_damage)
            if all(self.ranks.gather(result is not None)):
                assert result is not None
                return result
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(order)} is intact on every rank")

    def _checked_content(self, result: RestoreResult) -> _Content:
        """Checks healcore's part. Malformed values raise any exception."""
        healing, own = result.restored.healing or {}, result.restored.state.get(ITEM)
        if self.journal.state.lineage is None:  # the journal was deleted
            self.journal.state.lineage = healing.get("lineage")
        engines, problem = compatible(self.policy.engine, healing.get("engines"))
        host, ledger = self.host.read(own), None
        if healing.get("schema") == HEALING_SCHEMA:
            if healing.get("ledger"):
                ledger = Ledger.from_dict(healing["ledger"])
            if host is None and healing.get("world") == self.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
        self.loaders.check(_position(host) or {})
        comparisons = healing.get("comparisons")
        if comparisons is not None:
            comparisons = read_comparisons(comparisons)
        return _Content(dict(engines), problem, ledger, host, comparisons)

    def _load_state(
        self, result: RestoreResult, saved: _Content, engines: dict[str, Any], *, reset: bool
    ) -> HostParts | None:
        """Loads state and engines. Returns the part for `HostState`."""
        host_state = self._adapt_to_world(result, saved.host)
        state = result.restored.state
        self.driver.replace({name: each for name, each in state.items() if name != ITEM})
        if reset:
            self.driver.reset_moments()
        self.driver.load_healing(engines)
        return host_state

    def _adapt_to_world(self, result: RestoreResult, own: HostParts | None) -> HostParts | None:
        """Adapts this rank's part if the number of ranks has changed: all continue as rank 0.

        Random generators stay as the program has set them: added ranks have no saved state.
        """
        saved_by = (result.restored.healing or {}).get("world", self.ranks.world)
        if saved_by == self.ranks.world:
            return own
        parts = self.ranks.gather(None if own is None else own.data)
        first = parts[0]
        wrong = [
            f'"{name}" was saved in {saved_by} parts, one for each rank, but the number of ranks '
            f"is {self.ranks.world} now"
            for name, item in self.driver.items().items()
            if attribute(item, "per_rank")
        ]
        if any(_batches(each) != _batches(first) for each in parts[:saved_by]):
            wrong.append(f"its {saved_by} ranks were at different batches of their loaders")
        if wrong:
            raise StateMismatch(result.step, wrong)
        self.log.problem(
            result.step,
            f"checkpoint {result.step} was saved by {saved_by} ranks, but this run has "
            f"{self.ranks.world}: the saved random generators are not used; the loaders begin the "
            "epoch again and discard the batches before the checkpoint",
        )
        if first is None:
            return None
        data = {
            name: positions.of_other_ranks(each, saved_by) if isinstance(each, Mapping) else each
            for name, each in first.items()
        }
        return HostParts(None, None, None, data)

    def write_journal(self, now: int) -> None:
        """Writes the journal to disk, or reports that it could not."""
        try:
            update_from_disk(self.journal, self.checkpoints.store.steps())
            self.journal.write()
        except (OSError, StoreError) as error:
            problem = f"the journal could not be written: {error}"
            self.log.event("problem", step=now, problem=problem)
            if not self.journal_outdated:
                self.log.warning(problem)
            self.journal_outdated = True
        else:
            self.journal_outdated = False


def _position(own: HostParts | None) -> dict[str, Any] | None:
    return None if own is None else own.data


def _with(own: HostParts | None, forward: Mapping[str, Any]) -> dict[str, Any]:
    """Positions of the loaders: `forward` for loaders that a rollback did not rewind."""
    data = _position(own) or {}
    ranks = [
        each["ranks"] for each in data.values() if isinstance(each, Mapping) and "ranks" in each
    ]
    if ranks:
        forward = {n: positions.of_other_ranks(each, ranks[0]) for n, each in forward.items()}
    return {**data, **forward}


def _batches(data: Mapping[str, Any] | None) -> dict[str, Any]:
    places = {n: each for n, each in (data or {}).items() if isinstance(each, Mapping)}
    return {n: (each["kind"], each["epoch"], each["index"]) for n, each in places.items()}


def _steps_after(saves: Sequence[Saved], step: int) -> list[int]:
    return [save.step for save in saves if save.step > step]
