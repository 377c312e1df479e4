"""Carries out what the monitor requests: save, roll back, stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.driver import Driver
from healcore.runtime.events.models import RerunVerdict
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.assessment import AssessmentResult, Assessor, DamageVerdict
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.monitor import ActionRequest, IncidentMonitor
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import RollbackRecord, RunEnd, explain
from healcore.runtime.rollback.journal import Journal
from healcore.runtime.rollback.manager import RollbackManager, RollbackRequest, RollbackResult
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import Ranks

_BEFORE_LR_CUT = 2
"""Rollbacks in the same region that only skip more data; the next one cuts the learning rate."""


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


class ActionResult(NamedTuple):
    """What was done."""

    target: int | None = None
    """Step of the checkpoint that was restored; None: there was no rollback."""
    save: bool = False
    """A checkpoint has to be saved."""


@dataclass(eq=False, kw_only=True)
class ActionExecutor:
    """Carries out the monitor's requests, and those of the state check."""

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    ledger: Ledger
    rollbacks: RollbackManager
    monitor: IncidentMonitor
    reader: DelayedReader
    reruns: Reruns
    log: RunLog
    run_end: Callable[[str], RunEnd]
    """Takes the reason of a stop; returns the facts for the diagnosis."""
    assessor: Assessor
    completed: list[RollbackRecord] = field(default_factory=list, init=False)
    """Rollbacks of this process."""

    def execute(self, request: ActionRequest, step: int) -> ActionResult:
        """Carries out a request after `step` steps; raises RunStopped if it ends the run."""
        save = bool(request.action & Action.SAVE)
        if self._needs_evidence(request):
            result = self._assess(request, step)
            if result.verdict is not DamageVerdict.DAMAGE:
                self._decline(request, result)
                return ActionResult(save=save)
        if request.action & Action.STOP:
            self.stop(step, self._why_stop(request))
        if request.action & Action.ROLLBACK:
            exhausted = self._exhausted(request)
            if not exhausted:
                return ActionResult(target=self._roll_back(request, step))
            finite = self.ranks.gather(self.driver.finite())
            if not self._needs_evidence(request) or not all(finite):
                self.stop(step, exhausted)
            result = AssessmentResult(DamageVerdict.DAMAGE, "budget")
            self._log_assessment(request, step, result)
            self._decline(request, result)
        return ActionResult(save=save)

    def review_high_loss(self, step: int) -> ActionResult:
        """Goes back to before high losses attributed to different data, if they did harm."""
        period = self.assessor.high_loss_to_review()
        earlier = None if period is None else self.rollbacks.state_before(period.onset)
        if period is None or earlier is None:
            return ActionResult()
        request = self.monitor.request_rollback(period.onset, period.latest[0].index - 1)
        result = self.assessor.review(period, earlier)
        self._log_assessment(request, step, result)
        if result.verdict is not DamageVerdict.DAMAGE or self._exhausted(request):
            return ActionResult()
        return ActionResult(target=self._roll_back(request, step))

    def _needs_evidence(self, request: ActionRequest) -> bool:
        """Whether to assess first; not for a hook's request, nor for a rule that stops."""
        policy = self.policy
        if not policy.confirm or request.overridden:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & request.cause
            for rule in policy.engine.config.rules
        )
        return bool(request.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def _assess(self, request: ActionRequest, step: int) -> AssessmentResult:
        """Assesses whether the model is damaged on any rank, and writes an event."""
        result = self.assessor.assess(request)
        verdicts = self.ranks.gather(result.verdict.value)
        if DamageVerdict.DAMAGE.value in verdicts:
            result = result._replace(verdict=DamageVerdict.DAMAGE)
        self._log_assessment(request, step, result)
        return result

    def _log_assessment(self, request: ActionRequest, step: int, result: AssessmentResult) -> None:
        self.log.event(
            "assessment",
            step=step,
            onset=request.onset,
            cause=names(request.cause),
            verdict=result.verdict.value,
            by=result.by,
            rise=result.rise,
            rise_remembered=result.rise_remembered,
        )

    def _decline(self, request: ActionRequest, result: AssessmentResult) -> None:
        """Continues without the action; the engine gets its attempt back."""
        if request.action & Action.ROLLBACK:  # a stop has used no attempt
            self.driver.decline()
        if result.verdict is DamageVerdict.DATA:
            self.assessor.clear_batches()
        why = {
            DamageVerdict.DATA: "the model is unchanged, the data are different",
            DamageVerdict.OPEN: "the model is worse and may recover by itself",
            DamageVerdict.UNKNOWN: "there is no evidence that the model is worse",
            DamageVerdict.DAMAGE: "the budget of rollbacks is exhausted",
        }
        self.log.info(
            f"step {request.index}: {_cause_text(request.cause)}: {why[result.verdict]}; "
            "the run continues"
        )

    def _exhausted(self, request: ActionRequest) -> str:
        """Why no further rollback is granted; "": it is.

        The engine's budget is refunded by healthy steps, and repeated steps are healthy too; a
        hook's rollbacks use no budget. So this counts the rollbacks near the same step of the run.
        """
        reach = max(self.policy.refund_after, 1)
        near = self._near(request, reach)
        if near < max(self.policy.recoveries, 1):
            return ""
        return f"{near} rollbacks were needed within {reach} steps of the run"

    def _near(self, request: ActionRequest, reach: int) -> int:
        """Rollbacks so far whose onset was less than `reach` steps away."""
        return sum(abs(request.onset - past.onset) < reach for past in self.ledger.past_rollbacks)

    def _roll_back(self, request: ActionRequest, step: int) -> int:
        rerun, rate = self.reruns.should_rerun(request), self.driver.learning_rate()
        # Steps that are not read yet belong to the bad window if they have alarms too.
        bad = request.bad + self.monitor.bad_batches(list(self.reader.due(all=True)))
        bad, more = self._skipped_batches(request, bad)
        try:
            result = self.rollbacks.roll_back(
                RollbackRequest(
                    onset=request.onset,
                    depth=request.depth,
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
            now = self.driver.learning_rate()
            self.completed.append(
                RollbackRecord(
                    step=step,
                    onset=request.onset,
                    target=result.target,
                    lr_before=None if rate is None else rate * self.monitor.lr_scale_before,
                    lr_after=None if now is None else now * self._lr_scale(),
                    left_out=len(bad),
                )
            )
        self._log_rollback(request._replace(bad=bad), result, step, rerun)
        return result.target

    def _cuts_lr(self, request: ActionRequest, rerun: bool) -> bool:
        """Whether to cut the learning rate although no rule does: other data have not helped."""
        policy = self.policy
        cuts = policy.engine.cuts_lr and not request.action & Action.CUT_LR
        again = self._near(request, max(policy.region, 1))
        return policy.confirm and cuts and not rerun and again >= _BEFORE_LR_CUT

    def _skipped_batches(
        self, request: ActionRequest, bad: tuple[BatchId, ...]
    ) -> tuple[tuple[BatchId, ...], int]:
        """The batches to skip: the bad window, and how many after it.

        If the learning rate was too high, the data are not at fault, and the first rollback skips
        none. If the trouble returns at the same step although the window was skipped, it is wider
        than its alarms, and the window doubles each time.
        """
        again = self._near(request, self.policy.engine.config.incident.quiet_steps)
        if request.cause & Cause.INSTABILITY and request.action & Action.CUT_LR and not again:
            return (), 0
        return bad, len(bad) * (2**again - 1) if self.policy.confirm else 0

    def _lr_scale(self) -> float:
        engines = self.driver.healing().values()
        return min((each["state"]["lr"]["scale"] for each in engines), default=1.0)

    def _log_rollback(
        self, request: ActionRequest, result: RollbackResult, step: int, rerun: bool
    ) -> None:
        before, after = self.monitor.lr_scale_before, self._lr_scale()
        moved = result.moved
        resets = self.policy.reset_moments and not rerun
        self.log.event(
            "rollback",
            step=step,
            number=result.number,
            onset=request.onset,
            cause=names(request.cause),
            checkpoint=result.target,
            outcome="trial" if rerun else "done",
            lr=self.driver.learning_rate(),
            lr_scale_before=before,
            lr_scale=before if rerun else after,
            batches=[] if rerun else [list(each) for each in request.bad],
            repeated=result.repeated,
            initial=result.initial,
            moments_reset=True if resets else None,
        )
        data = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self.log.event("data", step=result.target, outcome=data, rewound=moved.rewound)
        cause = _cause_text(request.cause) or "ordered by a hook"
        if request.arrays:
            cause = _nonfinite_save(request)
        changed = (
            "nothing else is changed, to see whether it happens again"
            if rerun
            else f"learning rate × {after:g}, {'moments reset, ' if resets else ''}"
            f"data {data.split(':')[0]}"
        )
        kind = "first snapshot" if result.initial else "known-good checkpoint"
        self.log.warning(
            f"step {request.index}: {cause}, since step {request.since}; "
            f"back to the {kind} of step {result.target}; {changed}"
        )

    def stop(self, step: int, why: str) -> NoReturn:
        """Ends the run with a diagnosis and an event; raises RunStopped."""
        end = self.run_end(why)
        text = explain(end)
        self.log.event("stop", step=step, why=why, diagnosis=text, checkpoint=end.last_good)
        raise RunStopped(text, why, end.last_good)

    def _why_stop(self, request: ActionRequest) -> str:
        if request.arrays:
            return _nonfinite_save(request)
        if request.overridden:
            return "an on_incident hook stopped it"
        engines = self.driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"


def _cause_text(cause: Cause) -> str:
    return " and ".join(names(cause)).lower().replace("_", " ")


def _nonfinite_save(request: ActionRequest) -> str:
    return f"a save has found NaN or Inf in {', '.join(request.arrays[:3])}"
