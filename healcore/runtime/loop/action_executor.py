"""Carries out what the monitor requests with rollbacks and re-runs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.events.models import RerunVerdict
from healcore.runtime.incidents.assessment import AssessmentResult, DamageVerdict
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.monitor import ActionRequest, IncidentMonitor
from healcore.runtime.incidents.step_lines import cause_text
from healcore.runtime.ledger import Ledger, PastRollback
from healcore.runtime.loop.order_executor import (
    ActionResult,
    OrderExecutor,
    nonfinite_save,
)
from healcore.runtime.postmortem.diagnosis import RollbackRecord
from healcore.runtime.rollback.engine_states import lr_raised
from healcore.runtime.rollback.journal import Journal
from healcore.runtime.rollback.manager import RollbackManager, RollbackRequest, RollbackResult
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError

_BEFORE_LR_CUT = 2
"""Rollbacks in the same region that only skip more data; the next one cuts the learning rate."""
_BEFORE_DATA_SKIP = 2
"""Rollbacks at the same step that only cut the learning rate; the next one skips data too."""

_SAME_STEP = 2
"""Steps that an alarm may come later by chance."""


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
        """Of the last re-run: `transient` or `reproducible`; "": there was none."""

    def should_rerun(self, request: ActionRequest) -> bool:
        """Whether to answer a request with a re-run; a second one in a region shows nothing new."""
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


@dataclass(eq=False, kw_only=True)
class ActionExecutor(OrderExecutor):
    """Carries out the monitor's requests, and those of the state check, with rollbacks."""

    rollbacks: RollbackManager
    monitor: IncidentMonitor
    reader: DelayedReader
    reruns: Reruns
    completed: list[RollbackRecord] = field(default_factory=list, init=False)
    """Rollbacks of this process."""
    _rate_cuts: list[PastRollback] = field(default_factory=list, init=False)
    """Those of them that cut the learning rate for instability."""

    def review_high_loss(self, step: int) -> ActionResult:
        """Goes back to before high losses attributed to different data, if they did harm."""
        period = self.assessor.high_loss_to_review()
        found = None if period is None else self.rollbacks.state_before(period.onset)
        if period is None or found is None:
            return ActionResult()
        _, earlier = found
        request = self.monitor.request_rollback(period.onset, period.latest[0].index - 1)
        result = self.assessor.review(period, earlier)
        self._log_assessment(request, step, result)
        if result.verdict is not DamageVerdict.DAMAGE or self._exhausted(request):
            return ActionResult()
        request = request._replace(data_ordinary=result.data_ordinary and self._can_cut())
        return ActionResult(target=self._roll_back(request, step))

    def _state_before(self, onset: int) -> tuple[int, Mapping[str, Any]] | None:
        return self.rollbacks.state_before(onset)

    def _repeats(self, request: ActionRequest, result: AssessmentResult) -> bool:
        """It has come again at the same step, and neither the data nor the rate explain that.

        * *Damage* (by a `loss_fn`): the run has gone back from this step before, and the earlier
          weights find its batch ordinary. The loop itself changes the weights there.
        * *Instability* (without a `loss_fn`, which shows more): the rollback cut the rate, which
          would have delayed it. An older checkpoint is tried first: that one may have been damaged.

        Not if the schedule raises the rate at that very step.
        """
        if result.by == "remembered_batches":
            past = self.ledger.past_rollbacks if result.data_ordinary else []
            again = any(abs(request.onset - each.onset) <= _SAME_STEP for each in past)
        else:
            unstable = result.by == "instability" and self.assessor.loss_fn is None
            again = unstable and self._unstable_again(request)
        return again and not lr_raised(self.policy.engine, self.driver.healing())

    def _unstable_again(self, request: ActionRequest) -> bool:
        """A rollback that cut the rate has restored the checkpoint that this one would restore."""
        repeats = [
            past.target for past in self._rate_cuts if request.onset <= past.onset + _SAME_STEP
        ]
        if not repeats:
            return False
        try:
            return self.rollbacks.target(request.onset, self._depth(request)) in repeats
        except StoreError:
            return False

    def _can_cut(self) -> bool:
        """Whether the policy cuts the learning rate, and its budget has a cut left."""
        engines = self.driver.healing().values()
        left = all(each["state"]["budget"]["lr_cuts"] > 0 for each in engines)
        return self.policy.engine.cuts_lr and left

    def _roll_back(self, request: ActionRequest, step: int) -> int:
        rerun = self.reruns.should_rerun(request)
        # Steps that are not read yet belong to the bad window if they have alarms too.
        unread = list(self.reader.due(all=True))
        self.ledger.skips += sum(any(each.skip for each in late.records) for late in unread)
        bad = request.bad + self.monitor.bad_batches(unread)
        bad, more = self._skipped_batches(request, bad)
        try:
            result = self.rollbacks.roll_back(
                RollbackRequest(
                    onset=request.onset,
                    depth=self._depth(request),
                    step=step,
                    bad=bad,
                    more=more,
                    cut=self._cuts_lr(request, rerun),
                    rerun=request.index if rerun else None,
                )
            )
        except StoreError as error:
            self.rollbacks.abandon_plan(step)
            self.stop(step, str(error))
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
        )
        self._log_rollback(request._replace(bad=bad), result, done, rerun)
        if not rerun:
            self.completed.append(done)
            if request.cause & Cause.INSTABILITY and request.action & Action.CUT_LR:
                self._rate_cuts.append(PastRollback(request.onset, result.target))
        return result.target

    def _depth(self, request: ActionRequest) -> int:
        """Known-good checkpoints to go back.

        The engine goes further back from its second order on, and a declined order was none. But
        it learns of that a step or two later, when it may have ordered again.
        """
        rollback = self.policy.engine.config.rollback
        first = not request.overridden and not self._near(request, max(self.policy.region, 1))
        return min(request.depth, rollback.depth) if first else request.depth

    def _cuts_lr(self, request: ActionRequest, rerun: bool) -> bool:
        """Whether to cut the rate although no rule does: other data have not helped, or cannot."""
        policy = self.policy
        cuts = policy.engine.cuts_lr and not request.action & Action.CUT_LR
        again = self._near(request, max(policy.region, 1))
        needed = request.data_ordinary or again >= _BEFORE_LR_CUT
        return policy.confirm and cuts and not rerun and needed

    def _skipped_batches(
        self, request: ActionRequest, bad: tuple[BatchId, ...]
    ) -> tuple[tuple[BatchId, ...], int]:
        """The batches to skip: the bad window, and how many after it.

        If the learning rate was too high, the data are not at fault: a rollback that cuts it for
        instability skips none, unless the trouble has come back at the same step twice. If it
        returns although the window was skipped, it is wider than its alarms, and the window doubles
        each time.
        """
        again = self._near(request, self.policy.engine.config.incident.quiet_steps)
        if request.data_ordinary:
            return (), 0
        if request.cause & Cause.INSTABILITY and request.action & Action.CUT_LR:
            again -= _BEFORE_DATA_SKIP
            if again < 0:
                return (), 0
        return bad, len(bad) * (2**again - 1) if self.policy.confirm else 0

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
        changed = ["nothing else is changed, to see whether it happens again"]
        if not rerun:
            moments = "moments reset" if resets else ""
            changed = [done.lr_text, moments, f"data {data.split(':')[0]}"]
        kind = "first snapshot" if result.initial else "known-good checkpoint"
        self.log.warning(
            f"step {request.index}: {cause}, since step {request.since}; "
            f"back to the {kind} of step {done.target}"
            f"{f' ({result.why})' if result.why else ''}; {', '.join(filter(None, changed))}"
        )
