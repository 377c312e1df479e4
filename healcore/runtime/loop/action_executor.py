"""Carries out what the monitor requests: save, roll back, stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.assessment import AssessmentResult, Assessor, DamageVerdict
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.monitor import ActionRequest, IncidentMonitor
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.console_log import ConsoleLog
from healcore.runtime.loop.exits import RunStopped
from healcore.runtime.loop.reruns import Reruns
from healcore.runtime.postmortem.diagnosis import Case, Tried, explain
from healcore.runtime.rollback.manager import RollbackManager, RollbackRequest, RollbackResult
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import Ranks

_BEFORE_LR_CUT = 2
"""Rollbacks in the same region that only skip more data; the next one cuts the learning rate."""


class ActionResult(NamedTuple):
    """What was done."""

    target: int | None = None
    """Step of the checkpoint that was restored; None: there was no rollback."""
    save: bool = False
    """A checkpoint is to be saved."""


class ActionExecutor:
    """Carries out requests.

    Args:
        policy: the policy.
        driver: the live state.
        ranks: the processes of this run.
        ledger: rollbacks so far.
        rollbacks: rolls back.
        monitor: made the requests.
        reader: steps whose records have not been read.
        reruns: decides on re-runs.
        log_event: writes an event, see `Log.write`.
        console: the console log.
        case: what is known of a run that is stopped for a reason, for the diagnosis.
        assessor: distinguishes a damaged model from different data.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        ledger: Ledger,
        rollbacks: RollbackManager,
        monitor: IncidentMonitor,
        reader: DelayedReader,
        reruns: Reruns,
        log_event: Callable[..., object],
        console: ConsoleLog,
        case: Callable[[str], Case],
        assessor: Assessor,
    ) -> None:
        self._policy = policy
        self._driver = driver
        self._ranks = ranks
        self._ledger = ledger
        self._rollbacks = rollbacks
        self._monitor = monitor
        self._reader = reader
        self._reruns = reruns
        self._log_event = log_event
        self._console = console
        self._case = case
        self._assessor = assessor
        self.completed: list[Tried] = []
        """Rollbacks of this process."""

    def execute(self, request: ActionRequest, step: int) -> ActionResult:
        """Carries out a request.

        Args:
            request: what to do.
            step: steps done.

        Raises:
            RunStopped: a stop was ordered, or no rollback is left.
        """
        save = bool(request.action & Action.SAVE)
        if self._needs_evidence(request):
            result = self._assess(request, step)
            if result.verdict is not DamageVerdict.DAMAGE:
                self._decline(request, result)
                return ActionResult(save=save)
        if request.action & Action.STOP:
            self._stop(step, self._why_stop(request))
        if request.action & Action.ROLLBACK:
            exhausted = self._exhausted(request)
            if not exhausted:
                return ActionResult(target=self._roll_back(request, step))
            finite = self._ranks.gather(self._driver.finite())
            if not self._needs_evidence(request) or not all(finite):
                self._stop(step, exhausted)
            result = AssessmentResult(DamageVerdict.DAMAGE, "budget")
            self._log_assessment(request, step, result)
            self._decline(request, result)
        return ActionResult(save=save)

    def review_high_loss(self, step: int) -> ActionResult:
        """Goes back to before high losses that were attributed to different data, if they did harm.

        Args:
            step: steps done.
        """
        period = self._assessor.high_loss_to_review()
        earlier = None if period is None else self._rollbacks.state_before(period.onset)
        if period is None or earlier is None:
            return ActionResult()
        request = self._monitor.request_rollback(period.onset, period.latest[0].index - 1)
        result = self._assessor.review(period, earlier)
        self._log_assessment(request, step, result)
        if result.verdict is not DamageVerdict.DAMAGE or self._exhausted(request):
            return ActionResult()
        return ActionResult(target=self._roll_back(request, step))

    def _needs_evidence(self, request: ActionRequest) -> bool:
        """Whether to assess first: neither for a hook's request, nor for a rule that stops."""
        policy = self._policy
        if not policy.confirm or request.overridden:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & request.cause
            for rule in policy.engine.config.rules
        )
        return bool(request.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def _assess(self, request: ActionRequest, step: int) -> AssessmentResult:
        """Whether the model is damaged on any rank; writes an event."""
        result = self._assessor.assess(request)
        verdicts = self._ranks.gather(result.verdict.value)
        if DamageVerdict.DAMAGE.value in verdicts:
            result = result._replace(verdict=DamageVerdict.DAMAGE)
        self._log_assessment(request, step, result)
        return result

    def _log_assessment(self, request: ActionRequest, step: int, result: AssessmentResult) -> None:
        self._log_event(
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
        """The run continues, clipped; the attempt is refunded."""
        if request.action & Action.ROLLBACK:  # a stop has used no attempt
            self._driver.decline()
        if result.verdict is DamageVerdict.DATA:
            self._assessor.clear_batches()
        why = {
            DamageVerdict.DATA: "the model is unchanged, the data are different",
            DamageVerdict.OPEN: "the model is worse and may recover by itself",
            DamageVerdict.UNKNOWN: "there is no evidence that the model is worse",
            DamageVerdict.DAMAGE: "the budget of rollbacks is exhausted",
        }
        self._console.info(
            f"step {request.index}: {_in_words(request.cause)}: {why[result.verdict]}; "
            "the run continues"
        )

    def _exhausted(self, request: ActionRequest) -> str:
        """Why no further rollback is granted; "": it is.

        The engine's budget is refunded by healthy steps, and repeated steps are healthy too; a
        hook's rollbacks use no budget. So this counts the rollbacks near the same step of the run.
        """
        policy = self._policy
        reach = max(policy.refund_after, 1)
        near = self._near(request, reach)
        if near < max(policy.recoveries, 1):
            return ""
        return f"{near} rollbacks were needed within {reach} steps of the run"

    def _near(self, request: ActionRequest, reach: int) -> int:
        """Rollbacks so far whose onset was less than `reach` steps away."""
        past_rollbacks = self._ledger.past_rollbacks
        return sum(abs(request.onset - past.onset) < reach for past in past_rollbacks)

    def _roll_back(self, request: ActionRequest, step: int) -> int:
        rerun, rate = self._reruns.should_rerun(request), self._driver.learning_rate()
        # Steps that are not read yet belong to the bad window if they have alarms too.
        bad = request.bad + self._monitor.bad_batches(list(self._reader.due(all=True)))
        bad, more = self._skipped_batches(request, bad)
        try:
            result = self._rollbacks.roll_back(
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
            self._rollbacks.abandon_plan(step)
            self._stop(step, str(error))
        self._monitor.on_rollback(result.target)
        if rerun:
            self._reruns.start(request.onset, request.index)
            self._log_event("rerun", step=step, checkpoint=result.target, onset=request.onset)
        else:
            self._reruns.cancel()
            self.completed.append(self._tried(request, result, step, rate, len(bad)))
        self._log_rollback(request._replace(bad=bad), result, step, rerun)
        return result.target

    def _cuts_lr(self, request: ActionRequest, rerun: bool) -> bool:
        """Whether to cut the learning rate although no rule does: other data have not helped."""
        policy = self._policy
        cuts = policy.engine.cuts_lr and not request.action & Action.CUT_LR
        again = self._near(request, max(policy.region, 1))
        return policy.confirm and cuts and not rerun and again >= _BEFORE_LR_CUT

    def _skipped_batches(
        self, request: ActionRequest, bad: tuple[BatchId, ...]
    ) -> tuple[tuple[BatchId, ...], int]:
        """Which batches are skipped: the bad window, and how many after it.

        If the learning rate was too high, the data are not at fault and are trained on again the
        first time. If the trouble returns at the same step although the window was skipped, it is
        wider than its alarms, and the window doubles each time.
        """
        again = self._near(request, self._policy.engine.config.incident.quiet_steps)
        if request.cause & Cause.INSTABILITY and request.action & Action.CUT_LR and not again:
            return (), 0
        return bad, len(bad) * (2**again - 1) if self._policy.confirm else 0

    def _tried(
        self,
        request: ActionRequest,
        result: RollbackResult,
        step: int,
        rate: float | None,
        left_out: int,
    ) -> Tried:
        now = self._driver.learning_rate()
        return Tried(
            step=step,
            onset=request.onset,
            target=result.target,
            lr_before=None if rate is None else rate * self._monitor.lr_scale_before,
            lr_after=None if now is None else now * self._lr_scale(),
            left_out=left_out,
        )

    def _lr_scale(self) -> float:
        """The learning-rate multiplier now, the smallest of all engines."""
        engines = self._driver.healing().values()
        return min((each["state"]["lr"]["scale"] for each in engines), default=1.0)

    def _log_rollback(
        self, request: ActionRequest, result: RollbackResult, step: int, rerun: bool
    ) -> None:
        before, after = self._monitor.lr_scale_before, self._lr_scale()
        moved = result.moved
        self._log_event(
            "rollback",
            step=step,
            number=result.number,
            onset=request.onset,
            cause=names(request.cause),
            checkpoint=result.target,
            outcome="trial" if rerun else "done",
            lr=self._driver.learning_rate(),
            lr_scale_before=before,
            lr_scale=before if rerun else after,
            batches=[] if rerun else [list(each) for each in request.bad],
            repeated=result.repeated,
            initial=result.initial,
        )
        data = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self._log_event("data", step=result.target, outcome=data, rewound=moved.rewound)
        cause = _in_words(request.cause) or "ordered by a hook"
        if request.arrays:
            cause = _nonfinite_save(request)
        changed = (
            "nothing else is changed, to see whether it happens again"
            if rerun
            else f"learning rate × {after:g}, data {data.split(':')[0]}"
        )
        kind = "first snapshot" if result.initial else "known-good checkpoint"
        self._console.warning(
            f"step {request.index}: {cause}, since step {request.since}; "
            f"back to the {kind} of step {result.target}; {changed}"
        )

    def _stop(self, step: int, why: str) -> NoReturn:
        case = self._case(why)
        text, good = explain(case), case.last_good
        self._log_event("stop", step=step, why=why, diagnosis=text, checkpoint=good)
        raise RunStopped(text, why, good)

    def _why_stop(self, request: ActionRequest) -> str:
        if request.arrays:
            return _nonfinite_save(request)
        if request.overridden:
            return "an on_incident hook stopped it"
        engines = self._driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"


def _in_words(cause: Cause) -> str:
    return " and ".join(names(cause)).lower().replace("_", " ")


def _nonfinite_save(request: ActionRequest) -> str:
    return f"a save has found NaN or Inf in {', '.join(request.arrays[:3])}"
