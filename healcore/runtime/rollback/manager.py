"""Rolling back, and resuming after a crash: what is done, in which order, with a journal.

Nothing live is changed before every check has passed. Every step on disk can be repeated, so that a
start after a crash carries out the same plan again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from healcore.core.engine import StateError
from healcore.runtime.checkpoints.manager import CheckpointManager
from healcore.runtime.data import BatchId
from healcore.runtime.data import position as positions
from healcore.runtime.data.loader_registry import LoaderRegistry, RewindResult
from healcore.runtime.data.position import DataError
from healcore.runtime.driver import Driver, check_engines
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.ledger import Ledger, PastRollback
from healcore.runtime.rollback.checkpoint_choice import (
    CheckpointChoice,
    choose,
    common_to_ranks,
    newest_until,
    saved_after,
    why_older,
)
from healcore.runtime.rollback.engine_states import (
    Engines,
    LearningRate,
    after_rollback,
    at_rate,
    compatible,
    for_rerun,
    limited,
)
from healcore.runtime.rollback.host_state import ITEM, HostParts, HostState
from healcore.runtime.rollback.journal import (
    CompletedRollback,
    Journal,
    JournalError,
    RollbackPlan,
    check_lineage,
    directories,
    update_from_disk,
)
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
from healcore.runtime.store.background import Background
from healcore.runtime.store.directory import DirectoryStore
from healcore.runtime.store.errors import Untrusted
from healcore.runtime.store.memory import WHERE
from healcore.runtime.store.ranks import RankFailed, Ranks, agreed, on_each

T = TypeVar("T")
HEALING_SCHEMA = 2
"""Of what healcore keeps in a checkpoint, see `RollbackManager.contents`."""


class RollbackRequest(NamedTuple):
    """Why and how far to go back."""

    onset: int
    """Step of the incident's first alarm."""
    depth: int
    """Known-good checkpoints to go back, 1 = the newest before the onset."""
    step: int
    """Steps done now."""
    bad: tuple[BatchId, ...]
    """Ids of the bad window's batches."""
    better: int | None = None
    """Step of better weights: that checkpoint is restored, or the newest one before it."""
    limit: bool = False
    """Limit the learning rate too."""
    lr_at_fault: float | None = None
    """Learning rate that has caused the trouble. If it is None or NaN, the current rate."""
    rerun: int | None = None
    """For a re-run (same learning rate and data, no attempt used): the step that ordered it."""


class RollbackResult(NamedTuple):
    """What a rollback has done."""

    number: int
    """From 1, over the whole run."""
    target: int
    moved: RewindResult
    repeated: bool
    """The last rollback restored the same checkpoint, and nothing older exists."""
    initial: bool
    """There was no known-good checkpoint: the snapshot that the run started from was restored."""
    why: str
    """Why not a newer checkpoint from before the onset; "": it was the newest."""
    lr: LearningRate


class _Content(NamedTuple):
    """What healcore has kept in a checkpoint, checked; nothing is set."""

    engines: dict[str, Any]
    """The states that fit this policy."""
    problem: str
    """What is wrong with the other states, or an empty string."""
    ledger: Ledger | None
    host: HostParts | None


class AppliedPlan(NamedTuple):
    """The result of applying a plan to state and engines."""

    target: int
    engines: dict[str, dict[str, Any]]
    host_state: HostParts | None
    lr: LearningRate


@dataclass(eq=False, kw_only=True)
class RollbackManager:
    """Rolls back, and resumes from a checkpoint after a start."""

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
    """Step of the snapshot or checkpoint that this process started from."""
    damage: list[CheckpointDamaged] = field(default_factory=list, init=False)
    """Errors of the checkpoints that this process has found damaged."""
    unfit: list[StateMismatch] = field(default_factory=list, init=False)
    """Errors of the checkpoints that do not fit the state, newest first; `resume` used an older."""
    journal_outdated: bool = field(default=False, init=False)
    """The journal could not be written; the next save tries again."""
    _behind: Background = field(default_factory=lambda: Background("healcore-journal"), init=False)

    # -- the content of a checkpoint --------------------------------------------------------------

    def contents(self, step: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state to save after `step` steps, and what healcore keeps with it."""
        healing = {
            "schema": HEALING_SCHEMA,
            "lineage": self.journal.state.lineage,
            "step": step,
            "world": self.ranks.world,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }
        return self._items(), healing

    def _items(self) -> dict[str, Any]:
        """The live state, as a checkpoint holds it."""
        return {**self.driver.items(), ITEM: self.host}

    # -- rollback -------------------------------------------------------------------------------

    def roll_back(self, request: RollbackRequest) -> RollbackResult:
        """A rollback, from the choice of the checkpoint to the last entry in the journal.

        NoGoodCheckpoint if there is nothing to go back to; a StateMismatch leaves live state as is.
        """
        self.checkpoints.wait()
        self.checkpoints.verify_due(self.ledger, before=request.onset)
        self.find_damage()
        saves = self.saves()
        choice = self._choice(saves, request.onset, request.depth, request.better)
        why = (
            ""
            if request.better is not None
            else why_older(
                saves,
                choice,
                onset=request.onset,
                past_rollbacks=self.ledger.past_rollbacks,
                region=self.policy.region,
            )
        )
        rerun = request.rerun is not None
        bad = () if rerun else request.bad
        more = self.policy.skip_batches if bad else 0
        live = self.driver.healing()
        rate = self.driver.learning_rate()
        newer = {*saved_after(saves, onset=request.onset), *_newer(saves, choice.order[0])}
        plan = RollbackPlan(
            number=self.journal.state.rollbacks + 1,
            step=request.step,
            onset=request.onset,
            order=list(choice.order),
            quarantine=sorted(newer - {*choice.order}),
            engines=live,
            left_out=self.loaders.left_out(bad, more),
            forward=self.loaders.forward_positions(),
            rerun=None if request.rerun is None else [request.onset, request.rerun],
            lr=rate,
            limit=self._rate_at_fault(request, live, rate) if request.limit else None,
            skipped=len(bad),
        )
        self.journal.state.pending, self.journal.state.ledger = plan, self.ledger.to_dict()
        self.journal.state.quarantined += directories(saves, plan.quarantine)
        self.write_journal(request.step)
        self.log.event(
            "rollback_begin",
            step=request.step,
            number=plan.number,
            onset=request.onset,
            checkpoint=choice.order[0],
        )
        applied = self._apply_plan(plan, now=request.step)
        moved = self.loaders.rewind(_position(applied.host_state), bad, more)
        if applied.host_state is not None:  # after the loaders, which draw random numbers
            self.host.put_back(applied.host_state)
        self._complete(plan, applied)
        return RollbackResult(
            plan.number, applied.target, moved, choice.repeated, choice.initial, why, applied.lr
        )

    def _choice(
        self, saves: Sequence[Saved], onset: int, depth: int, better: int | None
    ) -> CheckpointChoice:
        if better is not None:
            return newest_until(saves, better)
        initial = self.journal.state.first_step, self.started_from
        return choose(
            saves,
            onset=onset,
            depth=depth,
            past_rollbacks=self.ledger.past_rollbacks,
            region=self.policy.region,
            initial=[step for step in initial if step is not None],
        )

    def _rate_at_fault(self, request: RollbackRequest, live: Engines, rate: float | None) -> float:
        """The learning rate in force during the trouble; the multiplier alone if it is unknown."""
        if request.lr_at_fault is not None and math.isfinite(request.lr_at_fault):
            return request.lr_at_fault
        scales = [self.policy.engine.from_dict(each).lr.scale for each in live.values()]
        return (1.0 if rate is None else rate) * float(min(scales, default=1.0))

    def _apply_plan(self, plan: RollbackPlan, *, now: int) -> AppliedPlan:
        """Quarantines, restores and loads. Repeating it has the same result."""
        counts = plan.rerun is None

        def load(result: RestoreResult, saved: _Content) -> AppliedPlan:
            merge = after_rollback if counts else for_rerun
            engines = merge(self.policy.engine, plan.engines, saved.engines)
            host = self._load_state(result, saved, engines, reset=self._resets(plan))
            # The schedule is at the restored step now. A re-run has everything as it was then.
            rate = self.driver.learning_rate() if counts else None
            if plan.limit is not None:
                # No step has been trained at the rate of the very first state.
                trained = result.step > (self.journal.state.first_step or 0)
                engines = limited(self.policy.engine, engines, plan.limit, rate, healthy=trained)
            engines, lr = at_rate(self.policy.engine, engines, rate, before=plan.lr)
            self.driver.load_healing(engines)
            lr = lr._replace(at_fault=plan.limit if rate is not None else None)
            return AppliedPlan(result.step, engines, host, lr)

        self.checkpoints.quarantine(plan.quarantine, now=now)
        applied, saved = self._load_first_intact(plan.order, load, now)
        self.checkpoints.quarantine(_newer(self.saves(), applied.target), now=now)
        self.checkpoints.retry_quarantine(applied.target)
        changed = "rate" if plan.limit is not None else "data" if plan.skipped else ""
        done = PastRollback(plan.onset, applied.target, plan.step, changed)
        self.ledger.on_rollback(done, saved.ledger, counts=counts)
        return applied

    def _complete(self, plan: RollbackPlan, applied: AppliedPlan) -> None:
        """Removes the plan from the journal; keeps the result until the next save."""
        state = self.journal.state
        state.pending, state.rollbacks = None, plan.number
        state.last_rollback = CompletedRollback(
            applied.target, applied.engines, replace(plan, engines={})
        )
        state.ledger = self.ledger.to_dict()
        if plan.rerun is not None:
            state.rerun_onsets.append(plan.onset)
        self.write_journal(applied.target)
        self.checkpoints.reload()

    # -- after a start --------------------------------------------------------------------------

    def finish_interrupted(self, plan: RollbackPlan) -> AppliedPlan:
        """Carries out a plan during which a process was killed; JournalError if nobody can."""
        try:
            self.loaders.check(plan.forward)
            check_engines(plan.engines, self.driver.healing())
            for each in plan.engines.values():
                self.policy.engine.from_dict(each)
        except (DataError, StateError) as error:
            raise self.journal.malformed() from error
        if self.journal.state.ledger is not None:
            self.ledger.take_over(Ledger.from_dict(self.journal.state.ledger), plan.order[0], None)
        applied = self._apply_plan(plan, now=plan.step)
        self.loaders.resume(_with(applied.host_state, plan.forward), plan.left_out)
        self._complete(plan, applied)
        return applied

    def resume(self, order: Sequence[int]) -> tuple[int, HostParts | None]:
        """Resumes from the newest intact checkpoint of `order`, steps with the newest first.

        Returns its step, and what to pass to `HostState.put_back` once the loop has named its
        loader. NoGoodCheckpoint if none is intact, StateMismatch if they are of another state. One
        process passes over checkpoints of another state if an older one fits: see `unfit`.
        """
        try:
            return self._resume(order)
        except StateMismatch as error:
            step = order[0] if error.step is None else error.step
            error = StateMismatch(step, error.differences, self._where())
            older = order[order.index(step) + 1 :]
            if not older or self.ranks.world > 1:
                raise error from None
            self.unfit.append(error)
        try:
            return self.resume(older)
        except (StateMismatch, NoGoodCheckpoint):
            raise self.unfit[0] from None

    def _where(self) -> str:
        return "" if self.journal.path is None else str(self.journal.path.parent)

    def _resume(self, order: Sequence[int]) -> tuple[int, HostParts | None]:
        last, live = self.journal.state.last_rollback, {}
        if last is not None:
            live, _ = compatible(self.policy.engine, last.engines)
            try:
                self.loaders.check(last.plan.forward)
                check_engines(live, self.driver.healing())
            except (DataError, StateError) as error:
                raise self.journal.malformed() from error

        def load(result: RestoreResult, saved: _Content) -> tuple[int, HostParts | None]:
            engines, reset = saved.engines, False
            if last is not None and result.step <= last.target:
                # Killed between the rollback and the first save after it, or that one is damaged.
                older = result.step < last.target
                engine = self.policy.engine
                engines = after_rollback(engine, live, engines, counted=True) if older else live
                reset = self._resets(last.plan)
            return result.step, self._load_state(result, saved, engines, reset=reset)

        (step, host_state), saved = self._load_first_intact(order, load)
        ledger, forward = saved.ledger, {}
        if last is not None and step <= last.target:
            of_journal, forward = self.journal.state.ledger, last.plan.forward
            ledger = None if of_journal is None else Ledger.from_dict(of_journal)
        if ledger is not None:
            self.ledger.take_over(ledger, step, saved.ledger)
        else:
            self.ledger.next_step = step
        left_out = {} if last is None else last.plan.left_out
        self.loaders.resume(_with(host_state, forward), left_out)
        return step, host_state

    # -- within ---------------------------------------------------------------------------------

    def saves(self) -> list[Saved]:
        """The checkpoints that every rank has."""
        listed = self.checkpoints.listed()
        return listed if self.ranks.world == 1 else common_to_ranks(self.ranks.gather(listed))

    def find_damage(self) -> None:
        """Reports checkpoints that are too damaged to be listed."""
        store = getattr(self.checkpoints.store, "disk", self.checkpoints.store)
        found = []
        with suppress(StoreError):  # a missing disk is reported where it is needed
            found = store.damaged() if isinstance(store, DirectoryStore) else []
        known = {(error.path, error.file) for error in self.damage}
        for error in agreed(self.ranks, found):
            if (error.path, error.file) not in known:
                self._log_damage(error)

    def _log_damage(self, error: CheckpointDamaged) -> None:
        self.damage.append(error)
        self.checkpoints.log_damage(error)

    def _load_first_intact(
        self, order: Sequence[int], load: Callable[[RestoreResult, _Content], T], now: int = -1
    ) -> tuple[T, _Content]:
        """What `load` returns for the first checkpoint of `order` that every rank can load.

        A checkpoint whose digests hold may still have values that no healcore has written, and
        these may raise anything: such a checkpoint is a damaged one, and the next older is tried.
        Only if no other can be loaded either, live state may be changed in part.
        """
        left, problem = list(order), "there is none"
        while left:
            result = self._restore(left)
            loaded = failure = None
            try:
                saved = on_each(self.ranks, lambda each=result: self._content(each))
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
        raise NoGoodCheckpoint(
            f"none of the checkpoints of steps {list(order)} can be loaded: {problem}"
        )

    def _restore(self, order: Sequence[int]) -> RestoreResult:
        """The first checkpoint that is intact on every rank: each has its own copy in memory."""
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
        raise NoGoodCheckpoint(
            f"none of the checkpoints of steps {list(order)} is intact on every rank"
        )

    def _content(self, result: RestoreResult) -> _Content:
        """Raises anything if healcore has not written it, JournalError if it is of another run."""
        healing, own = result.restored.healing or {}, result.restored.state.get(ITEM)
        check_lineage(self.journal, result)
        engines, problem = compatible(self.policy.engine, healing.get("engines"))
        host, ledger = self.host.read(own), None
        if healing.get("schema") == HEALING_SCHEMA:
            if healing.get("ledger"):  # of a schema that this version reads
                ledger = Ledger.from_dict(healing["ledger"])
            if host is None and healing.get("world") == self.ranks.world:
                raise StoreError("it has no random states and positions of the loaders")
        self.loaders.check(_position(host) or {})
        return _Content(dict(engines), problem, ledger, host)

    def _resets(self, plan: RollbackPlan) -> bool:
        """Whether a rollback resets the moments; a re-run changes nothing."""
        return self.policy.reset_moments and plan.rerun is None

    def _load_state(
        self, result: RestoreResult, saved: _Content, engines: dict[str, Any], *, reset: bool
    ) -> HostParts | None:
        """Loads state and engines; returns the part for `HostState`."""
        host_state = self._of_this_world(result, saved.host)
        state = result.restored.state
        self.driver.replace({name: each for name, each in state.items() if name != ITEM})
        if reset:
            self.driver.reset_moments()
        self.driver.load_healing(engines)
        return host_state

    def _of_this_world(self, result: RestoreResult, own: HostParts | None) -> HostParts | None:
        """What was saved per rank, for as many ranks as there are now.

        With another number of ranks all of them go on from the position of rank 0, by its index,
        and random generators stay as the program has set them: a rank more has none in the
        checkpoint, and ranks may have to draw the same numbers or different ones.
        """
        saved_by = (result.restored.healing or {}).get("world", self.ranks.world)
        if saved_by == self.ranks.world:
            return own
        parts = self.ranks.gather(None if own is None else own.data)
        first = parts[0]
        wrong = [
            f'"{name}" has a part of each of {saved_by} ranks, and there are {self.ranks.world} now'
            for name, item in self.driver.items().items()
            if getattr(item, "per_rank", False)
        ]
        if any(_batches(each) != _batches(first) for each in parts[:saved_by]):
            wrong.append(f"its {saved_by} ranks were at different batches of their loaders")
        if wrong:
            raise StateMismatch(result.step, wrong)
        self.log.problem(
            result.step,
            f"checkpoint {result.step} was saved by {saved_by} ranks, and there are "
            f"{self.ranks.world} now: random generators are as the program has set them, and "
            "loaders begin their epoch again and drop the batches before",
        )
        if first is None:
            return None
        data = {
            name: positions.of_other_ranks(each, saved_by) if isinstance(each, Mapping) else each
            for name, each in first.items()
        }
        return HostParts(None, None, None, data)

    def abandon_plan(self, now: int) -> None:
        """Removes a rollback that cannot be carried out, so that the next start does not try it."""
        self.journal.state.pending = None
        self.write_journal(now)

    def write_journal(self, now: int) -> None:
        """Writes the journal to disk, or reports that it could not."""
        try:
            update_from_disk(self.journal, self.checkpoints.store.steps())
            self.journal.write()
        except (OSError, StoreError) as error:
            # Training continues; only a crash before the next try would miss what it holds.
            problem = f"the journal could not be written: {error}"
            self.log.event("problem", step=now, problem=problem)
            if not self.journal_outdated:
                self.log.warning(problem)
            self.journal_outdated = True
        else:
            self.journal_outdated = False

    def record_first_checkpoint(self, now: int) -> None:
        """Writes into the journal, in the background, that something is on disk, once it is.

        Without that, a start that finds no checkpoint would take their loss for a new run.
        """
        journal = self.journal
        if journal.path is None or journal.state.newest_on_disk is not None:
            return
        with suppress(OSError, StoreError):  # the next save tries again
            update_from_disk(journal, self.checkpoints.store.steps())
        if journal.state.newest_on_disk is None:
            return
        write = journal.prepared_write()

        def job() -> None:
            try:
                write()
            except OSError:
                self.journal_outdated = True  # the next save writes and reports it

        self._behind.submit(now, "while writing the journal", job)


def _position(own: HostParts | None) -> dict[str, Any] | None:
    """Where the loaders were; None for an old checkpoint."""
    return None if own is None else own.data


def _with(own: HostParts | None, forward: Mapping[str, Any]) -> dict[str, Any]:
    """Where the loaders were; those that a rollback did not rewind are at `forward`."""
    data = _position(own) or {}
    ranks = [
        each["ranks"] for each in data.values() if isinstance(each, Mapping) and "ranks" in each
    ]
    if ranks:
        forward = {n: positions.of_other_ranks(each, ranks[0]) for n, each in forward.items()}
    return {**data, **forward}


def _batches(data: Mapping[str, Any] | None) -> dict[str, Any]:
    """The next batch of each loader in a checkpoint."""
    places = {n: each for n, each in (data or {}).items() if isinstance(each, Mapping)}
    return {n: (each["kind"], each["epoch"], each["index"]) for n, each in places.items()}


def _newer(saves: Sequence[Saved], step: int) -> list[int]:
    return [save.step for save in saves if save.step > step]
