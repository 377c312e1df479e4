"""Carrying out what the judge has ordered: save, go back, stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from healcore.core.verdict import Action, Cause, names
from healcore.runtime.data import BatchId
from healcore.runtime.driver import Driver
from healcore.runtime.events.models import RollbackOutcome
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.assessment import Assessor, Finding, Verdict
from healcore.runtime.incidents.delayed_reader import DelayedReader
from healcore.runtime.incidents.judge import Judge, Order
from healcore.runtime.ledger import Ledger
from healcore.runtime.loop.console_log import ConsoleLog
from healcore.runtime.loop.exits import RunStopped
from healcore.runtime.loop.reruns import Reruns
from healcore.runtime.postmortem.diagnosis import Case, Tried, explain
from healcore.runtime.rollback.manager import Arrival, RollbackManager, Wanted
from healcore.runtime.store import StoreError
from healcore.runtime.store.ranks import Ranks

_OTHER_DATA = 2  # rollbacks in the same region, each past more of the data; then the rate is cut


class Carried(NamedTuple):
    """What was done."""

    target: int | None = None
    """The step that the run is back at."""
    save: bool = False
    """A checkpoint was ordered."""


class Orders:
    """Carries them out.

    Args:
        policy: the policy.
        driver: the live state.
        ranks: the processes of this run.
        ledger: rollbacks so far.
        rollbacks: goes back.
        judge: gave the orders.
        reader: steps that are still on their way.
        reruns: second tries.
        log_event: writes an event, see `Log.write`.
        console: talks to a person.
        case: what is known of a run that is stopped for a reason, for the diagnosis.
        assessor: tells a damaged model from different data.
    """

    def __init__(
        self,
        *,
        policy: HostPolicy,
        driver: Driver,
        ranks: Ranks,
        ledger: Ledger,
        rollbacks: RollbackManager,
        judge: Judge,
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
        self._judge = judge
        self._reader = reader
        self._reruns = reruns
        self._log_event = log_event
        self._console = console
        self._case = case
        self._assessor = assessor
        self.tried: list[Tried] = []
        """Rollbacks of this process."""

    def carry_out(self, order: Order, step: int) -> Carried:
        """Does what is ordered.

        Args:
            order: it.
            step: steps done.

        Raises:
            RunStopped: stopping was ordered, or is all that is left.
        """
        save = bool(order.action & Action.SAVE)
        if self._needs_evidence(order):
            finding = self._assess(order, step)
            if finding.verdict is not Verdict.DAMAGE:
                self._decline(order, finding)
                return Carried(save=save)
        if order.action & Action.STOP:
            self._stop(step, self._why_stop(order))
        if order.action & Action.ROLLBACK:
            exhausted = self._exhausted(order)
            if not exhausted:
                return Carried(target=self._go_back(order, step))
            finite = self._ranks.gather(self._driver.finite())
            if not self._needs_evidence(order) or not all(finite):
                self._stop(step, exhausted)
            finding = Finding(Verdict.DAMAGE, "budget")
            self._report(order, step, finding)
            self._decline(order, finding)
        return Carried(save=save)

    def look_back(self, step: int) -> Carried:
        """Goes back to before high losses that were taken for different data, and only did damage.

        Args:
            step: steps done.
        """
        stretch = self._assessor.to_look_back_at()
        earlier = None if stretch is None else self._rollbacks.before(stretch.onset)
        if stretch is None or earlier is None:
            return Carried()
        order = self._judge.order_for(stretch.onset, stretch.latest[0].index - 1)
        finding = self._assessor.look_back(stretch, earlier)
        self._report(order, step, finding)
        if finding.verdict is not Verdict.DAMAGE or self._exhausted(order):
            return Carried()
        return Carried(target=self._go_back(order, step))

    def _needs_evidence(self, order: Order) -> bool:
        """Whether it is asked first: not for what a hook says, nor for a rule that says stop."""
        policy = self._policy
        if not policy.confirm or order.overridden:
            return False
        stops = any(
            rule.action & Action.STOP and rule.causes & order.cause
            for rule in policy.engine.config.rules
        )
        return bool(order.action & (Action.ROLLBACK | Action.STOP)) and not stops

    def _assess(self, order: Order, step: int) -> Finding:
        """Whether the model is worse, on any rank; an event says what was found."""
        finding = self._assessor.ask(order)
        verdicts = self._ranks.gather(finding.verdict.value)
        if Verdict.DAMAGE.value in verdicts:
            finding = finding._replace(verdict=Verdict.DAMAGE)
        self._report(order, step, finding)
        return finding

    def _report(self, order: Order, step: int, finding: Finding) -> None:
        self._log_event(
            "assessment",
            step=step,
            onset=order.onset,
            cause=names(order.cause),
            verdict=finding.verdict.value,
            by=finding.by,
            rise=finding.rise,
            rise_remembered=finding.rise_remembered,
        )

    def _decline(self, order: Order, finding: Finding) -> None:
        """The run goes on, clipped; the attempt is not spent."""
        if order.action & Action.ROLLBACK:  # a stop that was due has spent nothing
            self._driver.decline()
        if finding.verdict is Verdict.DATA:
            self._assessor.forget()
        cause = " and ".join(names(order.cause)).lower().replace("_", " ")
        why = {
            Verdict.DATA: "the model is what it was, the data are different",
            Verdict.OPEN: "the model is worse, and may come back by itself",
            Verdict.UNKNOWN: "nothing shows that the model is worse",
            Verdict.DAMAGE: "the rollbacks that the policy allows are spent",
        }
        self._console.info(f"step {order.index}: {cause}: {why[finding.verdict]}; the run goes on")

    def _exhausted(self, order: Order) -> str:
        """Why the run may not go back once more; empty: it may.

        The engine's budget is refunded by health, and steps that are taken again are healthy too;
        hooks are paid by nobody. What counts here is where in the run the trouble was.
        """
        policy = self._policy
        reach = max(policy.refund_after, 1)
        near = self._near(order, reach)
        if near < max(policy.recoveries, 1):
            return ""
        return f"it has gone back {near} times within {reach} steps of the run"

    def _near(self, order: Order, reach: int) -> int:
        """Rollbacks so far whose onset was less than `reach` steps away."""
        earlier = self._ledger.earlier
        return sum(abs(order.onset - past.onset) < reach for past in earlier)

    def _go_back(self, order: Order, step: int) -> int:
        trial, rate = self._reruns.wants(order), self._driver.learning_rate()
        # Steps that are still on their way belong to the window if they are bad too.
        bad = order.bad + self._judge.also_bad(list(self._reader.due(all=True)))
        bad, more = self._left_out(order, bad)
        wanted = Wanted(
            onset=order.onset,
            depth=order.depth,
            step=step,
            bad=bad,
            more=more,
            cut=self._cuts(order, trial),
            trial=order.index if trial else None,
        )
        try:
            arrival = self._rollbacks.go_back(wanted)
        except StoreError as error:
            self._rollbacks.give_up_plan(step)
            self._stop(step, str(error))
        self._judge.went_back(arrival.target)
        if trial:
            self._reruns.begin(order.onset, order.index)
            self._log_event("rerun", step=step, checkpoint=arrival.target, onset=order.onset)
        else:
            self._reruns.drop()
            self.tried.append(self._tried(order, arrival, step, rate, len(bad)))
        self._tell_arrival(order._replace(bad=bad), arrival, step, trial)
        return arrival.target

    def _cuts(self, order: Order, trial: bool) -> bool:
        """Whether the rate is cut, though no rule has: other data have not helped."""
        policy = self._policy
        cuts = policy.engine.cuts_lr and not order.action & Action.CUT_LR
        again = self._near(order, max(policy.region, 1))
        return policy.confirm and cuts and not trial and again >= _OTHER_DATA

    def _left_out(self, order: Order, bad: tuple[BatchId, ...]) -> tuple[tuple[BatchId, ...], int]:
        """Which batches are not taken again: the bad window, and how many after it.

        What a learning rate has broken is no fault of the data: the first time they are taken
        again. Where the trouble comes back at the same step although they were left out it is wider
        than what was seen of it, and the window doubles each time.
        """
        again = self._near(order, self._policy.engine.config.incident.quiet_steps)
        if order.cause & Cause.INSTABILITY and order.action & Action.CUT_LR and not again:
            return (), 0
        return bad, len(bad) * (2**again - 1) if self._policy.confirm else 0

    def _tried(
        self, order: Order, arrival: Arrival, step: int, rate: float | None, left_out: int
    ) -> Tried:
        now = self._driver.learning_rate()
        return Tried(
            step=step,
            onset=order.onset,
            target=arrival.target,
            lr_before=None if rate is None else rate * self._judge.lr_scale_before,
            lr_after=None if now is None else now * self._multiplier(),
            left_out=left_out,
        )

    def _multiplier(self) -> float:
        """The learning rate's multiplier in force, the smallest of all engines."""
        engines = self._driver.healing().values()
        return min((each["state"]["lr"]["scale"] for each in engines), default=1.0)

    def _tell_arrival(self, order: Order, arrival: Arrival, step: int, trial: bool) -> None:
        before, after = self._judge.lr_scale_before, self._multiplier()
        moved = arrival.moved
        self._log_event(
            "rollback",
            step=step,
            number=arrival.number,
            onset=order.onset,
            cause=names(order.cause),
            checkpoint=arrival.target,
            outcome=RollbackOutcome.TRIAL if trial else RollbackOutcome.DONE,
            lr=self._driver.learning_rate(),
            lr_scale_before=before,
            lr_scale=before if trial else after,
            batches=[] if trial else [list(each) for each in order.bad],
            repeated=arrival.repeated,
            initial=arrival.initial,
        )
        how = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self._log_event("data", step=arrival.target, outcome=how, rewound=moved.rewound)
        what = " and ".join(names(order.cause)).lower().replace("_", " ") or "an order of a hook"
        if order.arrays:
            what = f"a save has found NaN or Inf in {', '.join(order.arrays[:3])}"
        rest = (
            "nothing else is changed, to see whether it happens again"
            if trial
            else f"learning rate × {after:g}, data {how.split(':')[0]}"
        )
        kind = "first snapshot" if arrival.initial else "known-good checkpoint"
        self._console.warning(
            f"step {order.index}: {what}, since step {order.since}; "
            f"back to the {kind} of step {arrival.target}; {rest}"
        )

    def _stop(self, step: int, why: str) -> NoReturn:
        case = self._case(why)
        text, good = explain(case), case.last_good
        self._log_event("stop", step=step, why=why, diagnosis=text, checkpoint=good)
        raise RunStopped(text, why, good)

    def _why_stop(self, order: Order) -> str:
        if order.arrays:
            return f"a save has found NaN or Inf in {', '.join(order.arrays[:3])}"
        if order.overridden:
            return "an on_incident hook said so"
        engines = self._driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is spent, and the trouble goes on"
        return "a rule of the policy says so"
