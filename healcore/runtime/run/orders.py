"""Carrying out what the judge has ordered: save, go back, stop."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, NoReturn

from healcore.core.verdict import Action, names
from healcore.runtime.incidents.judging import Judge, Order
from healcore.runtime.incidents.lagging import Lagging
from healcore.runtime.postmortem.diagnosis import Case, Tried, explain
from healcore.runtime.recovery.recovering import Arrival, Recovery, Wanted
from healcore.runtime.run.ending import RunStopped
from healcore.runtime.run.narrating import Narrator
from healcore.runtime.run.trials import Trials
from healcore.runtime.store import StoreError


class Carried(NamedTuple):
    """What was done."""

    target: int | None = None
    """The step that the run is back at."""
    save: bool = False
    """A checkpoint was ordered."""


class Orders:
    """Carries them out.

    Args:
        recovery: goes back.
        judge: gave the orders.
        lagging: steps that are still on their way.
        trials: second tries.
        tell: takes events.
        narrator: talks to a person.
        case: what is known of a run that is stopped for a reason, for the diagnosis.
    """

    def __init__(
        self,
        *,
        recovery: Recovery,
        judge: Judge,
        lagging: Lagging,
        trials: Trials,
        tell: Callable[..., object],
        narrator: Narrator,
        case: Callable[[str], Case],
    ) -> None:
        self._recovery = recovery
        self._judge = judge
        self._lagging = lagging
        self._trials = trials
        self._tell = tell
        self._narrator = narrator
        self._case = case
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
        if order.action & Action.STOP:
            self._stop(step, self._why_stop(order))
        if order.action & Action.ROLLBACK:
            self._check_progress(order, step)
            return Carried(target=self._go_back(order, step))
        return Carried(save=bool(order.action & Action.SAVE))

    def _check_progress(self, order: Order, step: int) -> None:
        """Stops a run that goes back again and again without getting further.

        The engine's budget is refunded by health, and steps that are taken again are healthy too;
        hooks are paid by nobody. What counts here is where in the run the trouble was.
        """
        terms, earlier = self._recovery.terms, self._recovery.ledger.earlier
        reach = max(terms.refund_after, 1)
        near = [past for past in earlier if abs(order.onset - past.onset) < reach]
        if len(near) >= max(terms.recoveries, 1):
            self._stop(step, f"it has gone back {len(near)} times within {reach} steps of the run")

    def _go_back(self, order: Order, step: int) -> int:
        trial, driver = self._trials.wants(order), self._recovery.driver
        rate = driver.learning_rate()
        # Steps that are still on their way belong to the window if they are bad too.
        bad = order.bad + self._judge.also_bad(list(self._lagging.due(all=True)))
        wanted = Wanted(order.onset, order.depth, step, bad, order.index if trial else None)
        try:
            arrival = self._recovery.go_back(wanted)
        except StoreError as error:
            self._recovery.give_up_plan(step)
            self._stop(step, str(error))
        self._judge.went_back(arrival.target)
        if trial:
            self._trials.begin(order.onset, order.index)
            self._tell("rerun", step=step, checkpoint=arrival.target, onset=order.onset)
        else:
            self._trials.drop()
            self.tried.append(self._tried(order, arrival, step, rate, len(bad)))
        self._tell_arrival(order._replace(bad=bad), arrival, step, trial)
        return arrival.target

    def _tried(
        self, order: Order, arrival: Arrival, step: int, rate: float | None, left_out: int
    ) -> Tried:
        now = self._recovery.driver.learning_rate()
        return Tried(
            step=step,
            onset=order.onset,
            target=arrival.target,
            lr_before=None if rate is None else rate * self._judge.lr_scale_before,
            lr_after=None if now is None else now * self._judge.lr_scale,
            left_out=left_out,
        )

    def _tell_arrival(self, order: Order, arrival: Arrival, step: int, trial: bool) -> None:
        before, after = self._judge.lr_scale_before, self._judge.lr_scale
        moved = arrival.moved
        self._tell(
            "rollback",
            step=step,
            number=self._recovery.journal.page.rollbacks,
            onset=order.onset,
            cause=names(order.cause),
            checkpoint=arrival.target,
            outcome="trial" if trial else "done",
            lr=self._recovery.driver.learning_rate(),
            lr_scale_before=before,
            lr_scale=before if trial else after,
            batches=[] if trial else [list(each) for each in order.bad],
            repeated=arrival.repeated,
            initial=arrival.initial,
        )
        how = "rewound" if moved.rewound else f"goes on forward: {moved.why_not}"
        self._tell("data", step=arrival.target, outcome=how, rewound=moved.rewound)
        what = " and ".join(names(order.cause)).lower().replace("_", " ") or "an order of a hook"
        rest = (
            "nothing else is changed, to see whether it happens again"
            if trial
            else f"learning rate × {after:g}, data {how.split(':')[0]}"
        )
        kind = "first snapshot" if arrival.initial else "known-good checkpoint"
        self._narrator.warn(
            f"step {order.index}: {what}, since step {order.since}; "
            f"back to the {kind} of step {arrival.target}; {rest}"
        )

    def _stop(self, step: int, why: str) -> NoReturn:
        text, good = explain(self._case(why)), self._recovery.keeper.good
        self._tell("stop", step=step, why=why, diagnosis=text, checkpoint=good)
        raise RunStopped(text, why, good)

    def _why_stop(self, order: Order) -> str:
        if order.overridden:
            return "an on_incident hook said so"
        engines = self._recovery.driver.healing().values()
        if any(engine["state"]["budget"]["recoveries"] == 0 for engine in engines):
            return "the budget of recoveries is spent, and the trouble goes on"
        return "a rule of the policy says so"
