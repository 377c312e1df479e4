"""`HostRules`: rules that roll back for NaN or Inf if the weights have them.

A skipped step changes nothing, and its loss does not show whether the weights are finite. So the
host counts the hits, looks at the weights, and only then rolls back: see `evidence`.
"""

from __future__ import annotations

import numpy as np

from healcore.core.engine import RuleConfig, rules
from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action


class HostRules:
    """Counts the hits of the rules, separately for each optimizer."""

    def __init__(self, configs: tuple[RuleConfig, ...], *, depth: int, quiet_steps: int) -> None:
        """Starts without hits.

        Args:
            configs: see `Policy.host_rules`.
            depth: known-good checkpoint that an order restores; 1 is the newest.
            quiet_steps: steps in which no rule fires, after which a rule may order again.
        """
        self._configs = configs
        self._depth = depth
        self._quiet_steps = quiet_steps
        self.restart()

    def restart(self) -> None:
        """Forgets all hits, after a rollback."""
        self._states: dict[tuple[str, int], rules.RuleState] = {}
        self._fired: dict[str, int] = {}

    def ordered(self, record: StepRecord) -> StepRecord:
        """The record of a judged step, with a rollback if a rule orders one."""
        fired = False
        for number, config in enumerate(self._configs if record.judged else ()):
            key = record.engine, number
            state, hit = self._states.get(key), np.bool_(record.cause & config.causes)
            if state is None and not hit:
                continue  # most steps of most runs
            state = rules.init(config) if state is None else state
            step = np.int32(record.step)
            self._states[key], firing = rules.update(config, state, hit, step, 0, xp=np)
            fired |= bool(firing.fired)
        if not fired:
            return record
        before, self._fired[record.engine] = self._fired.get(record.engine), record.step
        if before is not None and record.step - before <= self._quiet_steps:
            return record
        return record._replace(action=record.action | Action.ROLLBACK, rollback_depth=self._depth)
