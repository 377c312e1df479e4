"""`HostRules`: the rules of a policy whose rollback the host orders, because it needs evidence."""

from __future__ import annotations

import numpy as np

from healcore.core.decision import Action
from healcore.core.engine import EngineConfig, RuleConfig
from healcore.core.engine.rule import RuleState, init_rule, update_rule
from healcore.core.step_record import StepRecord
from healcore.runtime.run.run_record import RunRecord


class HostRules:
    """Counts the hits of the rules whose rollback the host orders, separately for each optimizer.

    With `rollback.confirm`, a rollback for NaN or Inf needs evidence that the weights are damaged.
    The engine on the device cannot look at the weights, so the host counts these rules with the
    arithmetic of the engine. See `Policy.host_rules`.

    Args:
        rules: the policy's `host_rules`.
        config: has the depth and the quiet steps.
        record: its journal has the hits.
    """

    def __init__(
        self, rules: tuple[RuleConfig, ...], config: EngineConfig, record: RunRecord
    ) -> None:
        self._configs = rules
        self._depth = config.rollback.depth
        self._quiet_steps = config.incident.quiet_steps
        self._record = record

    def with_rollback_order(self, record: StepRecord) -> StepRecord:
        """Counts the hits of one record.

        Args:
            record: the record of a step and an optimizer.

        Returns:
            The record, with the action ROLLBACK and its depth if a rule orders a rollback. A rule
            that fires again within the quiet steps of its incident orders nothing.
        """
        fired = False
        journal = self._record.journal
        hits = journal.rule_hits
        if not record.judged or not (record.cause or hits):
            return record  # most steps end here
        for number, config in enumerate(self._configs):
            key = f"{number}/{record.engine}"
            saved = hits.get(key)
            hit = np.bool_(record.cause & config.causes)
            if saved is None and not hit:
                continue
            state = init_rule(config)
            # The window of another policy may have another length: it counts from the start.
            if saved is not None and len(saved) == 2 + config.within:
                streak, age, *window = map(np.int32, saved)
                state = RuleState(streak, np.array(window, np.int32), age)
            state, has_fired, _ = update_rule(
                config, state, hit, np.int32(record.step), quiet_steps=0
            )
            hits[key] = [int(state.streak), int(state.age), *map(int, state.window)]
            fired |= bool(has_fired)
        if not fired:
            return record
        before = journal.rule_fired.get(record.engine)
        journal.rule_fired[record.engine] = record.step
        if before is not None and record.step - before <= self._quiet_steps:
            return record
        return record._replace(action=record.action | Action.ROLLBACK, rollback_depth=self._depth)
