"""`RateLog`: the multipliers of the learning rates, and the event of each change."""

from __future__ import annotations

from healcore.core.decision import Action
from healcore.core.step_record import StepRecord
from healcore.runtime.driver import Driver, Engines, Rates
from healcore.runtime.reporting.run_log import RunLog


class RateLog:
    """Knows the learning-rate multiplier of each engine, and logs its changes.

    Args:
        driver: has the learning rates.
        log: the log, for the event of a change.
        observes: whether the policy only observes. The event then says so.
    """

    def __init__(self, driver: Driver, log: RunLog, *, observes: bool) -> None:
        self._driver = driver
        self._log = log
        self._observes = observes
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

    def rates_in_force(self) -> Rates:
        """The learning rates of the last step, with the engines' multipliers.

        Returns:
            Engine name -> learning rate, or None if it is unknown.
        """
        rates: dict[str, float | None] = {}
        for name, rate in self._driver.trained_rates().items():
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
        self._log.event(
            "lr",
            step=index,
            engine=record.engine,
            action=action,
            lr_scale_before=before,
            lr_scale=now,
            why=why,
            observed=self._observes,
        )
