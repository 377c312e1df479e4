"""Defines `Recovery`: carries out orders. Evidence first, then a rollback, a stop or nothing."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from healcore.core.verdict import NONFINITE, Action, Cause, names
from healcore.events.models import RerunVerdict, RollbackOutcome
from healcore.runtime.data.loader_registry import RewindResult
from healcore.runtime.dominance.dominance import Verdict
from healcore.runtime.driver import Driver
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.step_lines import cause_text, passes_power_of_ten
from healcore.runtime.recovery.change import change
from healcore.runtime.recovery.engine_states import without_limit
from healcore.runtime.recovery.ledger import Ledger
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.recovery.rollback import Rollback, Status
from healcore.runtime.run_log import RunLog
from healcore.runtime.store import StoreError
from healcore.runtime.store.errors import NoGoodCheckpoint
from healcore.runtime.store.ranks import Ranks, agreed


@dataclass(eq=False, kw_only=True)
class Recovery:
    """Carries out the orders of the monitor, of the state check and of comparisons of weights.

    Under a policy with `[rollback] confirm` an order needs evidence that the model is worse.
    Weights that are not finite are evidence; so is, without a `loss_fn`, a long incident of steps
    that are not finite. All other evidence comes from `dominance`, which needs a `loss_fn`.
    """

    policy: HostPolicy
    driver: Driver
    ranks: Ranks
    ledger: Ledger
    log: RunLog
    monitor: IncidentMonitor
    reader: DelayedReader
    stop: Callable[[str], NoReturn]
    """Ends the run with a diagnosis; takes the reason."""
    compares: Callable[[], bool] = lambda: False
    """Whether current and earlier weights are compared."""
    restorer: Restorer | None = None
    """Restores checkpoints. Without one, a rollback stays an order."""
    reruns: bool = False
    """Whether a rollback is preceded by a re-run with nothing changed."""
    verdict: str = field(default="", init=False)
    """Verdict of the last re-run: `transient` or `reproducible`, or an empty string."""
    _rerun: Rollback | None = field(default=None, init=False)
    """The re-run in progress."""
    _declined: Counter[str] = field(default_factory=Counter, init=False)
    """Reason -> orders declined; trouble that lasts brings an order every few steps."""

    @property
    def declined(self) -> int:
        """Orders declined in this process."""
        return self._declined.total()

    def carry_out(self, order: Rollback, step: int) -> None:
        """Carries out an order after `step` steps, and sets its status; may raise RunStopped."""
        if self._needs_evidence(order) and not self._has_evidence(order, step):
            return
        if order.action & Action.STOP:
            self.stop(self._why_stop(order))
        if not order.action & Action.ROLLBACK:
            return
        exhausted = self._exhausted(order)
        if not exhausted:
            order.rerun = self._needs_rerun(order)
            self._add_measures(order)
            self._roll_back(order, step)
            return
        if not self._needs_evidence(order) or not self._finite():
            self.stop(exhausted)
        self._decline(order, step, "budget", "the budget of rollbacks is exhausted")

    def roll_back_to_better(self, verdict: Verdict, step: int) -> Rollback:
        """Rolls back to weights that are better than the current ones; see `dominance`.

        If rollbacks have not helped here, the order is declined, and the limits that they have set
        are lifted.
        """
        order = self._order_of(verdict)
        self.log.event(
            "assessment",
            step=step,
            onset=order.onset,
            cause=[],
            verdict="damage",
            by="earlier_weights",
            rise=verdict.rise,
            rise_remembered=verdict.rise_remembered,
        )
        exhausted = self._exhausted(order)
        if not exhausted:
            self._roll_back(order, step)
            return order
        order.status, rate = Status.DECLINED, ""
        if self._may_limit_lr:
            self._lift_limits()
            rate = " at the full learning rate,"
        self.log.warning(
            f"step {order.index}: the weights of step {verdict.anchor} are better, but "
            f"{exhausted}: the run continues{rate} without further rollbacks for "
            f"{self.policy.region} steps"
        )
        return order

    # -- what is changed ------------------------------------------------------------------------

    def _order_of(self, verdict: Verdict) -> Rollback:
        assert self.restorer is not None  # only a run with checkpoints compares weights
        found = agreed(  # each rank reads its own optimizer
            self.ranks,
            change(
                verdict,
                self.ledger.same_trouble(verdict.onset),
                factor=self.policy.engine.config.lr.factor,
                first_step=self.restorer.journal.state.first_step or 0,
                may_limit=self._may_limit_lr,
                can_rewind=self.restorer.loaders.can_rewind,
            ),
        )
        return Rollback(
            index=verdict.index,
            onset=verdict.onset,
            since=verdict.onset,
            batches=[] if found.skip is None else self.monitor.batches_between(*found.skip),
            forced=True,
            better=verdict.anchor,
            lr_at_fault=found.lr_at_fault,
        )

    def _add_measures(self, order: Rollback) -> None:
        """Adds what an order of the policy changes: depth, limit of the learning rate, batches.

        The rate is limited if a rollback for the same trouble has not helped.
        """
        if order.rerun:
            order.batches = []
            return
        past = self.ledger.same_trouble(order.onset, self.policy.region)
        if not order.forced:
            rollback = self.policy.engine.config.rollback
            order.depth = rollback.depth + rollback.deepen * len(past)
        if self._may_limit_lr and past:
            order.lr_at_fault = math.nan

    @property
    def _may_limit_lr(self) -> bool:
        """Whether rollbacks limit the rate. Otherwise only rules of the policy cut it."""
        return self.policy.confirm and self.policy.engine.may_be_limited

    def _lift_limits(self) -> None:
        """Sets the full learning rate."""
        self.driver.load_healing(without_limit(self.policy.engine, self.driver.healing()))

    # -- carrying out ---------------------------------------------------------------------------

    def _roll_back(self, order: Rollback, step: int) -> None:
        if self.restorer is None:
            return
        # Steps that are not read yet belong to the trouble if they have alarms too.
        unread = list(self.reader.due(all=True))
        self.ledger.skips += sum(any(each.skip for each in late.records) for late in unread)
        if order.better is None and not order.rerun:
            order.batches += self.monitor.batches_of_alarms(unread)
        try:
            moved = self.restorer.apply(order, step)
        except StoreError as error:
            if order.better is None or not isinstance(error, NoGoodCheckpoint):
                self.stop(str(error))
            problem = f"the weights of step {order.better} are better, but {error}"
            self.log.problem(step, f"{problem}; the run continues without a rollback")
            return
        self.monitor.on_rollback(order.target)
        self._rerun = order if order.rerun else None
        self._log_rollback(order, moved)

    def log_rollback(self, done: Rollback, outcome: RollbackOutcome) -> None:
        """Writes the event of a rollback."""
        self.log.event(
            "rollback",
            step=done.step,
            number=done.number,
            onset=done.onset,
            cause=names(Cause(done.cause)),
            checkpoint=done.target,
            outcome=RollbackOutcome.TRIAL if done.rerun else outcome,
            lr=done.lr,
            lr_limit=done.lr_limit,
            lr_at_fault=None if done.lr is None else done.lr_at_fault,
            lr_scale_before=self.monitor.lr_scale_before,
            lr_scale=done.lr_scale,
            batches=[list(each) for each in done.batches],
            repeated=done.repeated,
            initial=done.initial,
            why=done.why_older or None,
            moments_reset=True if self._resets_moments(done) else None,
        )

    def _resets_moments(self, done: Rollback) -> bool:
        return self.policy.reset_moments and not done.rerun

    def _log_rollback(self, done: Rollback, moved: RewindResult) -> None:
        if done.rerun:
            self.log.event("rerun", step=done.step, checkpoint=done.target, onset=done.onset)
        self.log_rollback(done, RollbackOutcome.DONE)
        data = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self.log.event("data", step=done.target, outcome=data, rewound=moved.rewound)
        cause = cause_text(Cause(done.cause)) or "ordered by a hook"
        if done.arrays:
            cause = nonfinite_save(done)
        if done.better is not None:
            cause = f"the weights of step {done.better} are better on the same batches"
        changed = ["nothing else is changed, to see whether it happens again"]
        if not done.rerun:
            moments = "moments reset" if self._resets_moments(done) else ""
            changed = [done.lr_text, moments, f"data {data.split(':')[0]}"]
        kind = "checkpoint" if done.better is not None else "known-good checkpoint"
        kind = "first snapshot" if done.initial else kind
        self.log.warning(
            f"step {done.index}: {cause}, since step {done.since}; "
            f"back to the {kind} of step {done.target}"
            f"{f' ({done.why_older})' if done.why_older else ''}; "
            f"{', '.join(filter(None, changed))}"
        )

    # -- re-runs: a rollback with nothing changed, is the fault transient or reproducible? ------

    def _needs_rerun(self, order: Rollback) -> bool:
        """Whether to answer an order with a re-run first; at most one for the same trouble."""
        if not self.reruns or order.forced or self.restorer is None:
            return False
        past = self.ledger.same_trouble(order.onset, self.policy.region, reruns=True)
        return not past and self.restorer.loaders.can_rewind

    def resume_rerun(self, last: Rollback | None, step: int) -> None:
        """Continues a re-run of an earlier process, if the last rollback is one and not over."""
        self._rerun = last if last is not None and last.rerun and step <= last.index else None

    def observe_rerun(self, index: int, order: Rollback | None) -> None:
        """Takes every step, and logs the verdict at the end of a re-run."""
        rerun = self._rerun
        if rerun is None:
            return
        again = order is not None and bool(order.action & (Action.ROLLBACK | Action.STOP))
        if not again and index < rerun.index:
            return
        self._rerun = None
        self.verdict = RerunVerdict.REPRODUCIBLE if again else RerunVerdict.TRANSIENT
        self.log.event("verdict", step=index, outcome=self.verdict, onset=rerun.onset)
        self.log.info(f"step {index}: the fault of step {rerun.onset} is {self.verdict}")

    # -- evidence and budget --------------------------------------------------------------------

    def _needs_evidence(self, order: Rollback) -> bool:
        """Whether an order needs evidence. Exceptions: `forced`, and a rule that stops."""
        policy = self.policy
        if not policy.confirm or order.forced:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & order.cause
            for rule in policy.engine.config.rules
        )
        return bool(order.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def _finite(self) -> bool:
        """Whether the weights are finite on every rank."""
        return all(self.ranks.gather(self.driver.finite()))

    def _has_evidence(self, order: Rollback, step: int) -> bool:
        """Whether the model is known to be worse without a comparison of weights."""
        if not self._finite():
            self._log_assessment(order, step, "damage", "weights")
            return True
        if self.compares():
            self._decline(order, step, "nothing", "the current weights are not shown to be worse")
            return False
        if order.cause & NONFINITE and self._nonfinite_lasts(order):
            self._log_assessment(order, step, "damage", "repetition")
            return True
        why = "cannot tell without loss_fn whether the model is worse"
        if order.cause & NONFINITE:
            why = "the weights are finite"
        self._decline(order, step, "nothing", why)
        return False

    def _nonfinite_lasts(self, order: Rollback) -> bool:
        """Whether the incident has lasted for `probation` steps; finite weights may overflow too.

        After this time a checkpoint from within the incident could become known-good.
        """
        incident = self.ledger.last_incident
        return incident is not None and order.index - incident.onset >= self.policy.probation

    def _log_assessment(self, order: Rollback, step: int, verdict: str, by: str) -> None:
        cause = names(Cause(order.cause))
        self.log.event(
            "assessment", step=step, onset=order.onset, cause=cause, verdict=verdict, by=by
        )

    def _decline(self, order: Rollback, step: int, by: str, why: str) -> None:
        """Logs that the run continues without the action."""
        order.status = Status.DECLINED
        self._log_assessment(order, step, "unknown", by)
        self._declined[why] += 1
        times = self._declined[why]
        if passes_power_of_ten(times - 1, times):
            again = f" ({times} times so far)" if times > 1 else ""
            cause = cause_text(Cause(order.cause))
            self.log.info(f"step {order.index}: {cause}: {why}; the run continues{again}")

    def _exhausted(self, order: Rollback) -> str:
        """Reason why no further rollback is granted, or an empty string.

        The engine's budget is refunded by healthy steps, and repeated steps are healthy too; a
        hook's rollbacks use no budget. So this counts the rollbacks on the same ground.
        """
        reach = max(self.policy.refund_after, 1)
        near = len(self.ledger.same_trouble(order.onset, reach))
        if near < max(self.policy.recoveries, 1):
            return ""
        return f"{near} rollbacks have been made within {reach} steps of the run"

    def _why_stop(self, order: Rollback) -> str:
        if order.arrays:
            return nonfinite_save(order)
        if order.forced:
            return "an on_incident hook stopped it"
        engines = self.driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is exhausted, and the trouble continues"
        return "a rule of the policy stops it"


def nonfinite_save(order: Rollback) -> str:
    """Finding of a save, as a clause."""
    return f"a save has found NaN or Inf in {', '.join(order.arrays[:3])}"
