"""What every carrying out of a policy's orders has in common: evidence first, then save or stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.assessment import AssessmentResult, Assessor, DamageVerdict
from healcore.runtime.incidents.monitor import ActionRequest
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class ActionResult(NamedTuple):
    """What was done."""

    target: int | None = None
    """Step of the checkpoint that was restored; None: there was no rollback."""
    save: bool = False
    """A checkpoint has to be saved."""


@dataclass(eq=False, kw_only=True)
class OrderExecutor(ABC):
    """Carries out the monitor's requests; a subclass knows how the run goes back."""

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    ledger: Ledger
    log: RunLog
    run_end: Callable[[str], RunEnd]
    """Takes the reason of a stop; returns the facts for the diagnosis."""
    assessor: Assessor
    _declined: Counter[str] = field(default_factory=Counter, init=False)
    """Reason -> orders declined; trouble that lasts brings one every few steps."""

    @property
    def declined(self) -> int:
        """Orders declined in this process."""
        return self._declined.total()

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

    @abstractmethod
    def _roll_back(self, request: ActionRequest, step: int) -> int | None:
        """Goes back; the step of the checkpoint that was restored, or None if none was."""

    def _state_before(self, onset: int) -> tuple[int, Mapping[str, Any]] | None:
        """Step and a copy of the state that a rollback would restore; None if there is none."""
        return None

    def _repeats(self, request: ActionRequest, result: AssessmentResult) -> bool:
        """Whether a rollback has shown that another one would not help."""
        del request, result
        return False

    # -- within ---------------------------------------------------------------------------------

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
        result = self._of_all_ranks(self.assessor.assess(request))
        if result.verdict is DamageVerdict.DAMAGE:
            if self.assessor.loss_fn is not None:  # of one rank: to restore takes all of several
                earlier = self._state_before(request.onset)
                if earlier is not None:
                    result = self.assessor.with_earlier(result, *earlier)
            if result.verdict is DamageVerdict.DAMAGE and self._repeats(request, result):
                result = AssessmentResult(DamageVerdict.DATA, "repetition")
        self._log_assessment(request, step, result)
        return result

    def _of_all_ranks(self, result: AssessmentResult) -> AssessmentResult:
        """The same verdict on all ranks: damage where any has found it, with its evidence."""
        for verdict, by in self.ranks.gather((result.verdict.value, result.by)):
            if verdict == DamageVerdict.DAMAGE.value:
                return result._replace(verdict=DamageVerdict.DAMAGE, by=by)
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
            changed = result.verdict is DamageVerdict.DATA
            unstable = changed and bool(request.cause & Cause.INSTABILITY)
            self.driver.decline(cut=unstable and bool(request.action & Action.CUT_LR))
            if unstable or result.by == "repetition":
                # It would alarm again and again, so the baselines learn the new level. Not after a
                # high loss alone: that ends by itself, and the clip begins its warm-up again.
                self.driver.expect_change()
        evaluated = result.by == "remembered_batches"
        cannot_tell = result.verdict is DamageVerdict.UNKNOWN and evaluated
        if result.verdict is DamageVerdict.DATA or cannot_tell:
            self.assessor.clear_batches()
        why = {
            DamageVerdict.DATA: "the model is unchanged, the data or the loss are different"
            if result.by != "repetition"
            else "it has come again no later after a rollback",
            DamageVerdict.OPEN: "the model is worse and may recover by itself",
            DamageVerdict.UNKNOWN: self._why_unknown()
            if not evaluated
            else "earlier batches are worse too, which damage and new data both explain",
            DamageVerdict.DAMAGE: "the budget of rollbacks is exhausted",
        }
        reason = why[result.verdict]
        self._declined[reason] += 1
        times = self._declined[reason]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(request.cause)
            self.log.info(f"step {request.index}: {cause}: {reason}; the run continues{again}")

    def _why_unknown(self) -> str:
        """Why nothing was evaluated."""
        if self.ranks.world > 1:
            return "several ranks cannot tell whether the model is worse"
        if self.assessor.loss_fn is None:
            return "cannot tell without loss_fn whether the model is worse"
        return "there is no evidence that the model is worse"

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

    def stop(self, step: int, why: str) -> NoReturn:
        """Ends the run with a diagnosis."""
        end = self.run_end(why)
        text = explain(end)
        self.log.event("stop", step=step, why=why, diagnosis=text, checkpoint=end.last_good)
        raise RunStopped(text, why, end.last_good)

    def _why_stop(self, request: ActionRequest) -> str:
        if request.arrays:
            return nonfinite_save(request)
        if request.overridden:
            return "an on_incident hook stopped it"
        engines = self.driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"


def nonfinite_save(request: ActionRequest) -> str:
    """What a save has found, for a sentence."""
    return f"a save has found NaN or Inf in {', '.join(request.arrays[:3])}"
