"""`RateLog`: the multipliers and the rates of the steps, and a rate that does not go back."""

from __future__ import annotations

import math
from collections import defaultdict

from healcore.core.decision import Action
from healcore.core.step_record import StepRecord
from healcore.runtime.driver import Driver, Engines, Rates
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.monitor_state import MonitorState
from healcore.runtime.run.trouble import RollbackRecord

_REMEMBERED = 10_000
"""Steps whose rates are remembered. A rollback hardly ever goes back further."""
JUMP_STEPS = 100
"""Steps after a jump in which the line of an alarm names the rate before."""
_JUMP = 3.0
"""Smallest ratio of two rates in a row that is a jump. A warm-up that begins at its first rate
doubles at most."""
_SAME = 1e-3
"""Relative difference of two rates that does no harm."""


class RateLog:
    """Knows the learning-rate multiplier of each engine, and logs its changes.

    It also warns, once, if the program's own rate does not go back with the run: the program
    computes it from a counter that neither a rollback nor a restart restores.

        rollback   the first repeated step has another rate than at its first time
        restart    the first change of the rate is the first change of the run once more

    Args:
        driver: has the learning rates.
        log: the log, for the event of a change.
        state: keeps the first change of the rate for later processes.
        observes: whether the policy only observes. The event then says so.
    """

    def __init__(self, driver: Driver, log: RunLog, *, state: MonitorState, observes: bool) -> None:
        self._driver = driver
        self._log = log
        self._state = state
        self._observes = observes
        self._lr_scales: dict[str, float] = {}
        """Engine name -> its learning-rate multiplier, where it is known."""
        self._last: dict[str, float] = {}
        """Engine name -> the program's rate at the newest step that was read."""
        self._rates: defaultdict[str, dict[int, float]] = defaultdict(dict)
        """Engine name -> step -> the program's rate."""
        self._undone: dict[str, float] = {}
        """Engine name -> rate that the step of `_target` had before the last rollback."""
        self._target = -1
        """Step at which the run has continued by the last rollback or the start."""
        self._have_changed: set[str] = set()
        """The engines whose rate has changed in this process."""
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
        for name, rate in self._driver.learning_rates().items():
            rate = self._last.get(name, rate)
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
            self._last[record.engine] = record.lr
        differs = self._how_it_differs(index, record)
        if differs and not self._has_warned:
            self._has_warned = True
            self._log.problem(
                index,
                f"step {index}: the learning rate does not follow healer.step: it {differs}. Write "
                "it as a function of healer.step, or put the scheduler into `state`",
            )
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

    def rate_before(self, index: int, record: StepRecord) -> float | None:
        """The program's rate before it rose by much, for the line of an alarm.

        A line with the rate alone does not show that the rate is the cause: a reader does not know
        the usual rate of the run.

        Args:
            index: index of the step.
            record: its record.

        Returns:
            The rate before the newest such rise in the last `JUMP_STEPS` steps. None without one,
            or if the rate has fallen again since.
        """
        known = self._rates[record.engine]
        rates = [known.get(step) for step in range(index - JUMP_STEPS - 1, index)]
        before = None
        earlier = math.inf
        for rate in (*rates, record.lr):
            if rate and rate >= _JUMP * earlier:
                before = earlier
            earlier = rate or earlier
        if before is None or not record.lr or record.lr < _JUMP * before:
            return None
        return before

    def resume(self, step: int) -> None:
        """Continues at a step, at the start of a process. Steps before it may still be added."""
        self._target = step

    def on_rollback(self, done: RollbackRecord) -> None:
        """Keeps the rates of the step that is repeated first, and forgets all later ones.

        Args:
            done: the rollback. If the trouble begins at this step, its rate may be wrong.
        """
        self._target = done.checkpoint
        self._undone.clear()
        self._last.clear()
        for name, rates in self._rates.items():
            if self._target in rates and self._target < done.onset:
                self._undone[name] = rates[self._target]
            self._rates[name] = {step: rates[step] for step in rates if step < self._target}

    def _how_it_differs(self, index: int, record: StepRecord) -> str:
        """How the program's rate shows that it does not go back, as a predicate; or empty."""
        name, rate = record.engine, record.lr
        rates = self._rates[name]
        if rate is None or record.trained_rate is None or index in rates:
            return ""
        rates[index] = rate
        rates.pop(index - _REMEMBERED, None)
        undone = self._undone.get(name)
        if undone and index == self._target and not math.isclose(rate, undone, rel_tol=_SAME):
            return f"is {rate:.4g}, and was {undone:.4g} at this step before the rollback"
        before = rates.get(index - 1, rate)
        if rate == before or index <= self._target:
            return ""
        change = [before, rate]
        first = self._state.first_change.setdefault(name, change)
        has_changed = name in self._have_changed
        self._have_changed.add(name)
        if first != change or first is change:
            return ""
        if has_changed:
            first.clear()  # the rate is cyclic
            return ""
        return f"goes from {before:.4g} to {rate:.4g} once more, as at the start of the run"
