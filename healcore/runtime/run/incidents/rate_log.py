"""`RateLog`: the learning rates in force, and the event of each change of a multiplier."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from healcore.core.decision import Action
from healcore.core.step_record import StepRecord
from healcore.runtime.driver import Engines

if TYPE_CHECKING:
    from healcore.runtime.run.run import Run


class RateLog:
    """Knows the learning-rate multiplier of each engine, and logs its changes.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self.run = run
        self._lr_scales: dict[str, float] = {}
        """Engine name -> its learning-rate multiplier, where it is known."""

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

    def rates_in_force(self) -> dict[str, float]:
        """The learning rates of the last step that was read, with the engines' multipliers.

        The program may have set the next rate already, as a scheduler does after each step.

        Returns:
            Engine name -> learning rate, without rates that are unknown, NaN or Inf.
        """
        rates = {}
        for name, rate in {
            **self.run.driver.learning_rates(),
            **self.run.journal.last_rates,
        }.items():
            if rate is not None and math.isfinite(rate):
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
            self.run.journal.last_rates[record.engine] = float(record.lr)
        now, before = record.lr_scale, self._lr_scales.get(record.engine, 1.0)
        if now == before:
            return
        self._lr_scales[record.engine] = now
        is_cut = now < before and record.action & Action.CUT_LR
        if is_cut:
            why = "the policy cuts it"
        elif before == 1.0:
            why = "the schedule has risen above the limit of the last cut"
        elif now == 1.0:
            why = "the limit of the last cut has ended"
        else:
            return
        self.run.log.event(
            "lr",
            step=index,
            engine=record.engine,
            action=Action.CUT_LR if is_cut else None,
            lr_scale_before=before,
            lr_scale=now,
            why=why,
            observed=self.run.policy.observes,
        )
