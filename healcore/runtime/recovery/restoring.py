"""`Restorer`: restores checkpoints, for a rollback and for a start alike.

All checks pass before live state changes. A rollback loads its target, and then replaces the record
of the target by one rename. A process that is killed before the rename has changed nothing on disk,
and its successor finds the trouble again. After the rename every start resumes from the target.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from healcore.runtime.checkpoints.host_state import ITEM, HostParts, HostState
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import position as positions
from healcore.runtime.data.loader_registry import LoaderRegistry, RewindResult
from healcore.runtime.dominance.anchor import ComparisonState
from healcore.runtime.dominance.dominance import Dominance
from healcore.runtime.driver import Driver, check_engines
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Order, Rollback
from healcore.runtime.recovery import record as records
from healcore.runtime.recovery.checkpoint_choice import (
    CheckpointChoice,
    choose,
    common_to_ranks,
)
from healcore.runtime.recovery.engine_states import (
    after_rollback,
    apply_rate,
    compatible,
    limited,
    with_lr_states,
)
from healcore.runtime.recovery.record import Record
from healcore.runtime.recovery.trials import Trial
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import (
    CheckpointDamaged,
    CheckpointNotFound,
    NoGoodCheckpoint,
    Restored,
    Saved,
    StateMismatch,
    StoreError,
)
from healcore.runtime.store.host_copy import WHERE
from healcore.runtime.store.ranks import RankFailed, Ranks, agreed, on_each, on_first
from healcore.runtime.store.values import attribute

T = TypeVar("T")


class _Result(NamedTuple):
    step: int
    restored: Restored


class _Content(NamedTuple):
    """Healcore's part of a checkpoint, after its checks and before any use."""

    record: Record | None
    """Record of the checkpoint, or None if another program has saved it."""
    engines: dict[str, Any]
    """Engine states that fit this policy."""
    problem: str
    """Problem of the other engine states, or an empty string."""
    host: HostParts | None


@dataclass(eq=False, kw_only=True)
class Restorer:
    """Restores checkpoints, for rollbacks and after a start."""

    policy: HostPolicy
    driver: Driver
    checkpoints: CheckpointManager
    ledger: Ledger
    loaders: LoaderRegistry
    host: HostState
    ranks: Ranks
    log: RunLog
    record: Record = field(default_factory=Record, init=False)
    """The facts of the run, without those at a step, which `healing` adds."""
    started_from: int | None = field(default=None, init=False)
    """Step of the snapshot or checkpoint that this process started from, or None before."""
    damage: list[CheckpointDamaged] = field(default_factory=list, init=False)
    """Errors of damaged checkpoints, as this process has found them."""
    dominance: Dominance | None = field(default=None, init=False)
    """The comparisons of weights, whose state is saved."""

    # -- saving ---------------------------------------------------------------------------------

    def save(self, step: int, why: str) -> None:
        """Saves a checkpoint after `step` steps, for the reason `why`."""
        self.checkpoints.save(step, self.items(), self.healing(step), why)
        self.checkpoints.prune(step, self.ledger)

    def items(self) -> dict[str, Any]:
        """The live state to save, except healcore's record."""
        return {**self.driver.state(), ITEM: self.host}

    def healing(self, step: int) -> dict[str, Any]:
        """Healcore's record after `step` steps."""
        attempts, proven = self.checkpoints.course
        compares = self.dominance if self.dominance and self.dominance.is_enabled else None
        return replace(
            self.record,
            attempts=list(attempts),
            proven=proven,
            step=step,
            world=self.ranks.world,
            engines=self.driver.engines(),
            ledger=self.ledger,
            left_out=self.loaders.left_out(),
            forward=self.loaders.forward_positions(),
            comparisons=compares and compares.state,
        ).to_dict()

    def commit(self, step: int) -> None:
        """Replaces the record of a checkpoint by the current record, by one rename."""
        self.checkpoints.store.commit(step, self.healing(step))

    # -- rollback -------------------------------------------------------------------------------

    def roll_back(self, order: Order, step: int) -> tuple[Rollback, RewindResult]:
        """Carries out an order after `step` steps.

        Raises NoGoodCheckpoint without a usable checkpoint, StateMismatch if the checkpoints are of
        another state, and any other StoreError of the store; the live state is then unchanged.
        """
        self.checkpoints.wait()
        self.checkpoints.prove(self.ledger, before=order.onset)
        self.find_damage()
        choice, engine = self._choose(order), self.policy.engine
        live, lr, broken = self.driver.engines(), self.driver.learning_rate(), order.lr_at_fault
        if broken is not None and not math.isfinite(broken):
            # The rate in force; the multiplier alone if the rate is unknown.
            scales = [engine.from_dict(each).lr.scale for each in live.values()]
            broken = (1.0 if lr is None else lr) * float(min(scales, default=1.0))
        order = replace(order, lr_at_fault=broken)

        def load(result: _Result, saved: _Content) -> tuple[HostParts | None, Rollback]:
            engines = after_rollback(engine, live, saved.engines)
            if order.trial == Trial.ACCEPT:
                engines = with_lr_states(engines, order.lr_states)
            reset = self.policy.rollback.reset_moments
            host = self._load_state(result, saved, engines, reset=reset)
            rate = self.driver.learning_rate()  # the schedule is at the restored step
            if broken is not None:
                # No step has been trained at the rate of the very first state.
                trained = result.step > self.record.first_step
                engines = limited(engine, engines, broken, rate, healthy=trained)
            engines, limit, scale = apply_rate(engine, engines, rate)
            self.driver.load(None, engines)
            return host, Rollback(
                **vars(order),
                number=len(self.ledger.rollbacks) + 1,
                step=step,
                target=result.step,
                skipped=len(order.batches),
                initial=choice.initial,
                repeated=choice.repeated,
                lr=lr,
                lr_limit=limit,
                lr_scale=scale,
            )

        (host, done), saved = self._load_first_intact(choice.order, load, step)
        self.ledger.on_rollback(done, None if saved.record is None else saved.record.ledger)
        extra = self.policy.rollback.skip_batches if order.batches else 0
        moved = self.loaders.rewind(_position(host), order.batches, extra, order.read_again)
        if host is not None:  # after the loaders, which draw random numbers
            self.host.put_back(host)
        if self.dominance is not None:
            self.dominance.on_rollback(done.target)
        self.checkpoints.begin_attempt(done.target)
        self._commit_rollback(done)
        return done, moved

    def _choose(self, order: Order) -> CheckpointChoice:
        if order.better is not None:
            return choose(self.saves(), onset=order.better, exact=True)
        past = self.ledger.same_trouble(order.onset, self.policy.rollback.region)
        started = () if self.started_from is None else (self.started_from,)
        return choose(
            self.saves(),
            onset=order.onset,
            depth=order.depth,
            tried=[each.target for each in past],
            initial=(self.record.first_step, *started),
            exact=order.exact,
        )

    def _commit_rollback(self, done: Rollback) -> None:
        """Replaces the record of the restored checkpoint, and saves it if it is not on disk."""
        store, step = self.checkpoints.store, done.target
        try:
            self.commit(step)
            stored = lambda: any(s.step == step for s in store.steps_on_disk())  # noqa: E731
            if store.durable and not on_first(self.ranks, stored):
                self.save(step, "rollback")
        except (StoreError, OSError) as error:
            self.log.problem(
                done.step,
                f"the rollback is not on disk: {error}; a restart before the next save repeats it",
            )
        self.checkpoints.report_store_errors(done.step)

    # -- after a start --------------------------------------------------------------------------

    def newest_record(self) -> Record | None:
        """The newest record in the store, or None. Reads no arrays."""
        found: list[Record] = []
        healings = self.checkpoints.store.healings() if self.ranks.rank == 0 else {}
        for healing in agreed(self.ranks, healings).values():
            with suppress(Exception):  # the resume reports a malformed record
                found.append(records.read(healing))
        return max(found, key=lambda each: (len(each.attempts), each.step), default=None)

    def resume(self, newest: Record | None, order: Sequence[int]) -> tuple[int, HostParts | None]:
        """Resumes from the first intact checkpoint of `order`, steps in descending order.

        `newest` is the newest record. Returns the step, and the argument of `HostState.put_back`
        for when the loop has a loader.

        Raises NoGoodCheckpoint without an intact checkpoint, and StateMismatch for another state:
        an older checkpoint that fits would lose the steps since then.
        """

        def load(result: _Result, saved: _Content) -> tuple[Record, HostParts | None]:
            own = saved.record or Record(first_step=result.step, step=result.step)
            engines, source = saved.engines, own
            if newest is not None and len(newest.ledger.rollbacks) > len(own.ledger.rollbacks):
                # The target of the last rollback is damaged: its budgets hold for older ones too.
                source = newest
                live, _ = compatible(self.policy.engine, newest.engines)
                self.loaders.check(newest.forward)
                check_engines(live, self.driver.engines())
                engines = after_rollback(self.policy.engine, live, engines, counted=True)
            weights = self._copies(own.comparisons, result.step)
            repeats = source.repeats(result.step)
            reset = self.policy.rollback.reset_moments and repeats
            host = self._load_state(result, saved, engines, reset=reset)
            if self.dominance is not None and own.comparisons is not None:
                self.dominance.continue_from(own.comparisons, weights)
                if source is not own:
                    self.dominance.on_rollback(result.step)
            self.ledger.continue_from(source.ledger, result.step, own.ledger)
            self.loaders.resume(_with(host, source.forward if repeats else {}), source.left_out)
            return own, host

        try:
            (own, host), _ = self._load_first_intact(order, load)
        except StateMismatch as error:
            root = self.checkpoints.store.root
            raise replace(error, where="" if root is None else str(root)) from None
        vars(self.record).update(vars(newest or own), completed=False)
        self.checkpoints.begin_attempt(own.step, self.record.course)
        return own.step, host

    def _copies(self, saved: ComparisonState | None, resumed: int) -> dict[int, Any]:
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
                self.driver.load({name: each for name, each in state.items() if name != ITEM})
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
        self, order: Sequence[int], load: Callable[[_Result, _Content], T], now: int = -1
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
            ends = isinstance(failure, (StateMismatch, MemoryError))
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
            self._log_damage(CheckpointDamaged(result.step, path, "its content", text))
            left = left[left.index(result.step) + 1 :]
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(order)} can be loaded: {problem}")

    def _restore(self, order: Sequence[int]) -> _Result:
        """Reads the first checkpoint that is intact on every rank; copies in memory may differ."""
        store, like, damaged = self.checkpoints.store, self.items(), []
        for step in order:
            restored = None
            try:
                restored = store.restore(step, like)
            except CheckpointNotFound:
                pass
            except CheckpointDamaged as error:
                damaged.append(str(error))
                self._log_damage(error)
            if all(self.ranks.gather(restored is not None)):
                assert restored is not None
                return _Result(step, restored)
        reasons = "; ".join(damaged) or "none of them is on every rank"
        raise NoGoodCheckpoint(f"no checkpoint of steps {list(order)} can be restored: {reasons}")

    def _checked_content(self, result: _Result) -> _Content:
        """Checks healcore's part. Malformed values raise any exception."""
        healing, own = result.restored.healing, result.restored.state.get(ITEM)
        record = None if healing is None else records.read(healing)
        host = self.host.read(own)
        if record is not None:
            if record.step != result.step:
                raise StoreError(f"its record is of step {record.step}")
            if host is None and record.world == self.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
            self.loaders.check(record.forward)
        engines, problem = compatible(self.policy.engine, record.engines if record else {})
        self.loaders.check(_position(host) or {})
        return _Content(record, dict(engines), problem, host)

    def _load_state(
        self, result: _Result, saved: _Content, engines: dict[str, Any], *, reset: bool
    ) -> HostParts | None:
        """Loads state and engines. Returns the part for `HostState`."""
        host_state = self._adapt_to_world(result, saved)
        state = {name: each for name, each in result.restored.state.items() if name != ITEM}
        self.driver.load(state, engines, reset_moments=reset)
        return host_state

    def _adapt_to_world(self, result: _Result, saved: _Content) -> HostParts | None:
        """Adapts this rank's part if the number of ranks has changed: all continue as rank 0.

        Random generators stay as the program has set them: added ranks have no saved state.
        """
        own = saved.host
        saved_by = self.ranks.world if saved.record is None else saved.record.world
        if saved_by == self.ranks.world:
            return own
        parts = self.ranks.gather(None if own is None else own.data)
        first = parts[0]
        wrong = [
            f'"{name}" was saved in {saved_by} parts, one for each rank, but the number of ranks '
            f"is {self.ranks.world} now"
            for name, item in self.driver.state().items()
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
