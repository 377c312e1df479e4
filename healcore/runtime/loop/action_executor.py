"""Carries out the monitor's requests with rollbacks and re-runs."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from healcore.core.verdict import Action, names
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.dominance.dominance import Verdict
from healcore.runtime.events.models import RerunVerdict
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.monitor import ActionRequest, IncidentMonitor
from healcore.runtime.incidents.step_lines import cause_text
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.order_executor import (
    ActionResult,
    OrderExecutor,
    nonfinite_save,
)
from healcore.runtime.postmortem.diagnosis import RollbackRecord
from healcore.runtime.rollback.engine_states import without_limit
from healcore.runtime.rollback.journal import Journal
from healcore.runtime.rollback.manager import RollbackManager, RollbackRequest, RollbackResult
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError
from healcore.runtime.store.errors import NoGoodCheckpoint
from healcore.runtime.store.ranks import agreed


class RerunWindow(NamedTuple):
    """The steps that are run again."""

    onset: int
    last: int
    """The step that brought the request."""


@dataclass(eq=False, kw_only=True)
class Reruns:
    """Runs a bad window again with nothing changed: is the fault transient or reproducible?

    At most one re-run at a time, and one in a region (`HostPolicy.region`).
    """

    enabled: bool
    region: int
    loaders: LoaderRegistry
    ledger: Ledger
    journal: Journal
    """Knows the re-runs of earlier processes too."""
    log: RunLog

    def __post_init__(self) -> None:
        self._window: RerunWindow | None = None
        self.verdict = ""
        """Verdict of the last re-run: `transient` or `reproducible`, or an empty string."""

    def should_rerun(self, request: ActionRequest) -> bool:
        """Whether to answer a request with a re-run, at most one in a region."""
        past = (each.onset for each in self.ledger.past_rollbacks)
        onsets = [*self.journal.state.rerun_onsets, *past]
        near = any(abs(request.onset - onset) <= self.region for onset in onsets)
        return self.enabled and not near and not request.overridden and self.loaders.can_rewind

    def start(self, onset: int, last: int) -> None:
        """Observes the window from now on, after the rollback to before it."""
        self._window = RerunWindow(onset, last)

    def cancel(self) -> None:
        """Ends the re-run without a verdict, because an ordinary rollback has replaced it."""
        self._window = None

    def observe(self, index: int, request: ActionRequest | None) -> None:
        """Takes every step, and logs the verdict at the end of the window."""
        window = self._window
        if window is None:
            return
        again = request is not None and bool(request.action & (Action.ROLLBACK | Action.STOP))
        if not again and index < window.last:
            return
        self._window = None
        self.verdict = RerunVerdict.REPRODUCIBLE if again else RerunVerdict.TRANSIENT
        self.log.event("verdict", step=index, outcome=self.verdict, onset=window.onset)
        self.log.info(f"step {index}: the fault of step {window.onset} is {self.verdict}")


class Change(NamedTuple):
    """What a run changes after a rollback to better weights."""

    lr_at_fault: float | None = None
    """Learning rate that has caused the trouble, NaN if it is unknown, or None if no rate has."""
    skip: tuple[int, int] | None = None
    """First and last step whose batches are skipped, or None if no batch is."""


@dataclass(eq=False, kw_only=True)
class ActionExecutor(OrderExecutor):
    """Carries out the requests of the monitor and of the state check with rollbacks."""

    rollbacks: RollbackManager
    monitor: IncidentMonitor
    reader: DelayedReader
    reruns: Reruns
    completed: list[RollbackRecord] = field(default_factory=list, init=False)
    """Rollbacks of this process."""

    def roll_back_to_better(self, verdict: Verdict, step: int) -> ActionResult:
        """Rolls back to weights that are better than the current ones; see `dominance`.

        If rollbacks have not helped here, the result has no target, and the limits that they have
        set are lifted.
        """
        change = agreed(self.ranks, self._change(verdict))  # each rank reads its own optimizer
        request = self.monitor.request_rollback(
            verdict, lr_at_fault=change.lr_at_fault, skip=change.skip
        )
        self.log.event(
            "assessment",
            step=step,
            onset=request.onset,
            cause=[],
            verdict="damage",
            by="earlier_weights",
            rise=verdict.rise,
            rise_remembered=verdict.rise_remembered,
        )
        exhausted = self._exhausted(request)
        if not exhausted:
            return ActionResult(target=self._roll_back(request, step))
        rate = ""
        if self._may_limit_lr:
            self.driver.load_healing(without_limit(self.policy.engine, self.driver.healing()))
            rate = " at the full learning rate,"
        self.log.warning(
            f"step {request.index}: the weights of step {verdict.anchor} are better, but "
            f"{exhausted}: the run continues{rate} without further rollbacks for "
            f"{self.policy.region} steps"
        )
        return ActionResult()

    def _change(self, verdict: Verdict) -> Change:
        """What the run changes when it repeats the steps of the trouble: the first that applies.

        * The earlier weights find the batches of the trouble unusual: the run skips these batches.
        * The earlier weights are the first of the run, or the learning rate is far above the rate
          at the earlier weights: the rate is at fault.
        * The trouble is new: nothing, because damage may have no cause in the run.
        * Nothing has been changed for it yet: the rate, if it is unknown or above the rate at the
          earlier weights, otherwise the data. The run skips all batches since the earlier weights,
          and at the end of the data all that are left.
        * One of the two has been changed: the other one.
        """
        if not verdict.data_ordinary:
            return Change(skip=(verdict.onset, verdict.found))
        healthy, factor = verdict.healthy_rate, self.policy.engine.config.lr.factor
        first, highest = next(iter(verdict.rates), math.nan), max(verdict.rates, default=math.nan)
        if self._may_limit_lr:
            if verdict.anchor <= (self.rollbacks.journal.state.first_step or 0):
                return Change(lr_at_fault=first)
            if healthy and highest * factor > healthy:
                return Change(lr_at_fault=highest)
        before = self.ledger.rollback_before(verdict.onset)
        if before is None:
            return Change()
        raised = not healthy or not highest <= healthy
        rate = before.changed == "data" or (not before.changed and raised)
        if self._may_limit_lr and (rate or not self.rollbacks.loaders.can_rewind):
            return Change(lr_at_fault=first)
        at_end = verdict.index < verdict.due
        return Change(skip=(verdict.anchor, verdict.index if at_end else verdict.found))

    def _roll_back(self, request: ActionRequest, step: int) -> int | None:
        rerun = self.reruns.should_rerun(request)
        # Steps that are not read yet belong to the bad window if they have alarms too.
        unread = list(self.reader.due(all=True))
        self.ledger.skips += sum(any(each.skip for each in late.records) for late in unread)
        bad = request.bad
        if request.better is None:
            bad += self.monitor.bad_batches(unread)
        try:
            result = self.rollbacks.roll_back(
                RollbackRequest(
                    onset=request.onset,
                    depth=self._depth(request),
                    step=step,
                    bad=bad,
                    better=request.better,
                    limit=self._limits_lr(request, rerun),
                    lr_at_fault=request.lr_at_fault,
                    rerun=request.index if rerun else None,
                )
            )
        except StoreError as error:
            self.rollbacks.abandon_plan(step)
            if request.better is None or not isinstance(error, NoGoodCheckpoint):
                self.stop(step, str(error))
            problem = f"the weights of step {request.better} are better, but {error}"
            self.log.problem(step, f"{problem}; the run continues without a rollback")
            return None
        self.monitor.on_rollback(result.target)
        if rerun:
            self.reruns.start(request.onset, request.index)
            self.log.event("rerun", step=step, checkpoint=result.target, onset=request.onset)
        else:
            self.reruns.cancel()
        done = RollbackRecord(
            step=step,
            onset=request.onset,
            target=result.target,
            lr=result.lr.schedule,
            lr_limit=result.lr.limit,
            lr_scale=result.lr.scale,
            left_out=0 if rerun else len(bad),
            lr_at_fault=result.lr.at_fault,
        )
        self._log_rollback(request._replace(bad=bad), result, done, rerun)
        if not rerun:
            self.completed.append(done)
        return result.target

    def _depth(self, request: ActionRequest) -> int:
        """Number of known-good checkpoints to go back: one more for each rollback nearby."""
        rollback = self.policy.engine.config.rollback
        if request.overridden:
            return request.depth
        return rollback.depth + rollback.deepen * self._near(request, max(self.policy.region, 1))

    @property
    def _may_limit_lr(self) -> bool:
        """Whether rollbacks limit the rate. Otherwise only rules of the policy cut it."""
        return self.policy.confirm and self.policy.engine.may_be_limited

    def _limits_lr(self, request: ActionRequest, rerun: bool) -> bool:
        """Whether to limit the rate with the rollback.

        Reasons: the rate is at fault, or a rollback for weights that are not finite has not helped.
        """
        if not self._may_limit_lr or rerun:
            return False
        if request.better is not None:
            return request.lr_at_fault is not None
        return self._near(request, max(self.policy.region, 1)) > 0

    def _log_rollback(
        self, request: ActionRequest, result: RollbackResult, done: RollbackRecord, rerun: bool
    ) -> None:
        moved = result.moved
        resets = self.policy.reset_moments and not rerun
        self.log.event(
            "rollback",
            step=done.step,
            number=result.number,
            onset=done.onset,
            cause=names(request.cause),
            checkpoint=done.target,
            outcome="trial" if rerun else "done",
            lr=done.lr,
            lr_limit=done.lr_limit,
            lr_at_fault=done.lr_at_fault,
            lr_scale_before=self.monitor.lr_scale_before,
            lr_scale=done.lr_scale,
            batches=[] if rerun else [list(each) for each in request.bad],
            repeated=result.repeated,
            initial=result.initial,
            why=result.why or None,
            moments_reset=True if resets else None,
        )
        data = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self.log.event("data", step=result.target, outcome=data, rewound=moved.rewound)
        cause = cause_text(request.cause) or "ordered by a hook"
        if request.arrays:
            cause = nonfinite_save(request)
        if request.better is not None:
            cause = f"the weights of step {request.better} are better on the same batches"
        changed = ["nothing else is changed, to see whether it happens again"]
        if not rerun:
            moments = "moments reset" if resets else ""
            changed = [done.lr_text, moments, f"data {data.split(':')[0]}"]
        kind = "checkpoint" if request.better is not None else "known-good checkpoint"
        kind = "first snapshot" if result.initial else kind
        self.log.warning(
            f"step {request.index}: {cause}, since step {request.since}; "
            f"back to the {kind} of step {done.target}"
            f"{f' ({result.why})' if result.why else ''}; {', '.join(filter(None, changed))}"
        )
