"""`RateLog`: the multipliers of the learning rates, and a rate that does not go back."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import TYPE_CHECKING

from healcore.core.decision import Action
from healcore.core.step_record import StepRecord
from healcore.runtime.driver import Engines, Rates

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run

_REMEMBERED = 10_000
"""Steps whose rates are remembered. A rollback hardly ever goes back further."""
_SAME = 1e-3
"""Relative difference of two rates that does no harm."""


class RateLog:
    """Knows the learning-rate multiplier of each engine, and logs its changes.

    It also warns, once, if the program's own rate does not go back with the run: the program
    computes it from a counter that neither a rollback nor a restart restores.

        rollback   the first repeated step has another rate than at its first time
        restart    the first step has the rate of the very first step of the run once more

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lr_scales: dict[str, float] = {}
        """Engine name -> its learning-rate multiplier, where it is known."""
        self._rates: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """Engine name -> step -> the program's rate, oldest first."""
        self._has_warned = False

    def read(self, engines: Engines) -> None:
        """Takes the multipliers from the engines' states, without an event.

        Args:
            engines: engine name -> what `Driver.engines` returns for it.
        """
        self._lr_scales = {name: saved["state"]["lr"]["scale"] for name, saved in engines.items()}

    @property
    def lr_scale(self) -> float:
        """The learning-rate multiplier in (0, 1], the smallest of all engines.

        It is 1 as long as no engine has cut its learning rate. The report and the events of
        rollbacks show it.
        """
        return min(self._lr_scales.values(), default=1.0)

    def rates_in_force(self) -> Rates:
        """The learning rates of the last step that was read, with the engines' multipliers.

        The program may have set the next rate already, as a scheduler does after each step.

        Returns:
            Engine name -> learning rate, or None if it is unknown.
        """
        rates: dict[str, float | None] = {}
        for name, rate in self.run.driver.learning_rates().items():
            rate = self.run.journal.last_rates.get(name, rate)
            rates[name] = rate
            if rate is not None:
                rates[name] = rate * self._lr_scales.get(name, 1.0)
        return rates

    def add(self, index: int, record: StepRecord) -> None:
        """Writes an event for each cut, and when the multiplier leaves 1 or returns to 1.

        Other changes have no event: the multiplier may change at every step of a ramp, and while
        the schedule is above a limit.

        Args:
            index: index of the step.
            record: the record of one optimizer at this step.
        """
        if record.lr is not None:
            self._add_rate(index, record.engine, float(record.lr), taken=record.taken)
        now = record.lr_scale
        before = self._lr_scales.get(record.engine, 1.0)
        if now == before and not record.action:
            return
        self._lr_scales[record.engine] = now
        action = None
        if record.action & Action.CUT_LR:
            action = Action.CUT_LR
        if action is not None and now < before:
            why = "the policy cuts it"
        elif now < before == 1.0:
            why = "the schedule has risen above the limit of the last cut"
        elif before < now == 1.0:
            why = "the limit of the last cut has ended"
        else:
            return
        self.run.log.event(
            "lr",
            step=index,
            engine=record.engine,
            action=action,
            lr_scale_before=before,
            lr_scale=now,
            why=why,
            observed=self.run.policy.observes,
        )

    def _add_rate(self, index: int, engine: str, rate: float, *, taken: bool) -> None:
        """Adds the program's rate of a step, and warns if it does not follow the run."""
        journal = self.run.journal
        if taken and rate:
            differs = self._how_it_differs(index, engine, rate)
            if differs and not self._has_warned:
                self._has_warned = True
                self.run.log.problem(
                    index,
                    f"step {index}: the learning rate does not follow healer.step: it {differs}. "
                    "Write it as a function of healer.step, or put the scheduler into `state`",
                )
            rates = self._rates[engine]
            rates[index] = rate
            rates.pop(index - _REMEMBERED, None)
            first = journal.first_rates.setdefault(engine, rate)
            is_back = first != journal.last_rates.get(engine, rate)
            if is_back and math.isclose(rate, first, rel_tol=_SAME):
                journal.first_rates[engine] = 0.0  # the rate is cyclic
        journal.last_rates[engine] = rate

    def _how_it_differs(self, index: int, engine: str, rate: float) -> str:
        """How the program's rate shows that it does not go back, as a predicate; or empty."""
        journal, rates = self.run.journal, self._rates[engine]
        if not rates:  # the first step of this process
            first, last = journal.first_rates.get(engine), journal.last_rates.get(engine, rate)
            is_first = first is not None and math.isclose(rate, first, rel_tol=_SAME)
            if is_first and not math.isclose(rate, last, rel_tol=_SAME):
                return f"goes from {last:.4g} to {rate:.4g}, as at the start of the run"
            return ""
        newest = next(reversed(rates))
        if index >= newest:
            return ""
        undone = rates.get(index, rate)  # the step is repeated
        self._rates[engine] = {step: rates[step] for step in rates if step < index}
        in_force = self.run.ledger.in_force
        may_be_wrong = bool(in_force) and index >= in_force[-1].onset
        if may_be_wrong or math.isclose(rate, undone, rel_tol=_SAME):
            return ""
        return f"is {rate:.4g}, and was {undone:.4g} at this step before the rollback"
