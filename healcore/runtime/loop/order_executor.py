"""Base of the executors of a policy's orders: evidence first, then rollback, save or stop."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, NoReturn

from healcore.core.verdict import NONFINITE, Action, names
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.monitor import ActionRequest
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem.diagnosis import RunEnd, explain
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class ActionResult(NamedTuple):
    """Result of a request."""

    target: int | None = None
    """Step of the checkpoint that was restored, or None without a rollback."""
    save: bool = False
    """A checkpoint has to be saved."""


@dataclass(eq=False, kw_only=True)
class OrderExecutor(ABC):
    """Carries out the monitor's requests; a subclass knows how to roll back.

    Under a policy with `[rollback] confirm` an order needs evidence that the model is worse.
    Weights that are not finite are evidence; so is, without a `loss_fn`, a long incident of steps
    that are not finite. All other evidence comes from `dominance`, which needs a `loss_fn`.
    """

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    ledger: Ledger
    log: RunLog
    run_end: Callable[[str], RunEnd]
    """Takes the reason of a stop; returns the facts for the diagnosis."""
    compares: Callable[[], bool]
    """Whether current and earlier weights are compared."""
    _declined: Counter[str] = field(default_factory=Counter, init=False)
    """Reason -> orders declined; trouble that lasts brings an order every few steps."""

    @property
    def declined(self) -> int:
        """Orders declined in this process."""
        return self._declined.total()

    def execute(self, request: ActionRequest, step: int) -> ActionResult:
        """Carries out a request after `step` steps; raises RunStopped if it ends the run."""
        save = bool(request.action & Action.SAVE)
        if self._needs_evidence(request) and not self._has_evidence(request, step):
            return ActionResult(save=save)
        if request.action & Action.STOP:
            self.stop(step, self._why_stop(request))
        if request.action & Action.ROLLBACK:
            exhausted = self._exhausted(request)
            if not exhausted:
                return ActionResult(target=self._roll_back(request, step))
            if not self._needs_evidence(request) or not self._finite():
                self.stop(step, exhausted)
            self._decline(request, step, "budget", "the budget of rollbacks is exhausted")
        return ActionResult(save=save)

    @abstractmethod
    def _roll_back(self, request: ActionRequest, step: int) -> int | None:
        """Rolls back. Returns the step of the checkpoint that was restored, or None."""

    # -- within ---------------------------------------------------------------------------------

    def _needs_evidence(self, request: ActionRequest) -> bool:
        """Whether a request needs evidence. Exceptions: `overridden`, and a rule that stops."""
        policy = self.policy
        if not policy.confirm or request.overridden:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & request.cause
            for rule in policy.engine.config.rules
        )
        return bool(request.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def _finite(self) -> bool:
        """Whether the weights are finite on every rank."""
        return all(self.ranks.gather(self.driver.finite()))

    def _has_evidence(self, request: ActionRequest, step: int) -> bool:
        """Whether the model is known to be worse without a comparison of weights."""
        if not self._finite():
            self._log_assessment(request, step, "damage", "weights")
            return True
        if self.compares():
            self._decline(request, step, "nothing", "the current weights are not shown to be worse")
            return False
        if request.cause & NONFINITE and self._nonfinite_lasts(request):
            self._log_assessment(request, step, "damage", "repetition")
            return True
        why = "cannot tell without loss_fn whether the model is worse"
        if request.cause & NONFINITE:
            why = "the weights are finite"
        self._decline(request, step, "nothing", why)
        return False

    def _nonfinite_lasts(self, request: ActionRequest) -> bool:
        """Whether the incident has lasted for `probation` steps; finite weights may overflow too.

        After this time a checkpoint from within the incident could become known-good.
        """
        incident = self.ledger.last_incident
        return incident is not None and request.index - incident.onset >= self.policy.probation

    def _log_assessment(self, request: ActionRequest, step: int, verdict: str, by: str) -> None:
        self.log.event(
            "assessment",
            step=step,
            onset=request.onset,
            cause=names(request.cause),
            verdict=verdict,
            by=by,
        )

    def _decline(self, request: ActionRequest, step: int, by: str, why: str) -> None:
        """Logs that the run continues without the action."""
        self._log_assessment(request, step, "unknown", by)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(request.cause)
            self.log.info(f"step {request.index}: {cause}: {why}; the run continues{again}")

    def _exhausted(self, request: ActionRequest) -> str:
        """Reason why no further rollback is granted, or an empty string.

        The engine's budget is refunded by healthy steps, and repeated steps are healthy too; a
        hook's rollbacks use no budget. So this counts the rollbacks near the same step of the run.
        """
        reach = max(self.policy.refund_after, 1)
        near = self._near(request, reach)
        if near < max(self.policy.recoveries, 1):
            return ""
        return f"{near} rollbacks have been made within {reach} steps of the run"

    def _near(self, request: ActionRequest, reach: int) -> int:
        """Rollbacks so far whose onset was less than `reach` steps away."""
        return self.ledger.rollbacks_near(request.onset, reach)

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
    """Finding of a save, as a clause."""
    return f"a save has found NaN or Inf in {', '.join(request.arrays[:3])}"
