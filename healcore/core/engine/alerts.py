"""The part of a policy that only alerts or saves, and therefore need not run in the training step.

A step needs clipping, skips and the learning-rate multiplier, and the incidents and budgets on
which these depend. All other detectors and rules only write a line, save, or give a reason to
compare weights. They run on the host, from signals that have arrived there. Both parts together
decide as the whole policy does, bit for bit.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine import incident, rules
from healcore.core.engine.config import EngineConfig
from healcore.core.engine.judge import (
    cause_flags,
    fresh_actions,
    remaining_grace,
    run_detectors,
    run_rules,
)
from healcore.core.engine.state import EngineState
from healcore.core.numerics import settle
from healcore.core.recorded import record
from healcore.core.signals import Signals, observe
from healcore.core.step_record import StepRecord
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action, Cause


class AlertState(NamedTuple):
    """State of the part of a policy that only alerts."""

    grace: Any  # int32: remaining steps of the grace window
    detectors: tuple[Any, ...]
    rules: tuple[rules.RuleState, ...]
    cause: Any  # int32: `Cause` flags of the last step
    action: Any  # int32: `Action` flags of the last step
    z_loss: Any  # float32: score of the loss-spike detector
    alarms: Any  # int32: steps with a cause of this part and no other


def acting_causes(config: EngineConfig) -> int:
    """`Cause` flags that can change a step: those that a rule answers with a skip or with `ACTS`.

    A rule runs in one place, so the other causes of a rule with such a cause belong to them. With
    clipping per tensor all causes do, because the host does not get the norm of each tensor.
    """
    if config.clip is not None and config.clip[0] == "adagc":
        return -1
    causes, before = incident.causes(config), 0
    while causes != before:  # a rule may join the causes of two other rules
        before = causes
        for rule in config.rules:
            causes |= rule.causes if rule.causes & causes else 0
    return causes


class Alerts:
    """The part of a policy that only alerts or saves; its state is on the host."""

    def __init__(self, whole: EngineConfig) -> None:
        """Divides a policy.

        Args:
            whole: the policy.
        """
        acting = acting_causes(whole)
        self._in_step = (
            [bool(int(detector.CAUSE) & acting) for _, detector in whole.detectors],
            [bool(rule.causes & acting) for rule in whole.rules],
        )
        """For each detector and each rule: whether it runs in the step."""
        self.step_config = self._config(whole, in_step=True)
        """The policy without this part."""
        self.config = self._config(whole, in_step=False)
        """The policy with the detectors and rules of this part only."""
        self._scores_loss = any(name == "loss_spike" for name, _ in self.config.detectors)
        self._programs: dict[tuple[bool, ...], Any] = {}
        """Whether each signal is present -> the recorded step."""

    def _config(self, whole: EngineConfig, *, in_step: bool) -> EngineConfig:
        detectors_in, rules_in = self._in_step
        return whole._replace(
            detectors=_part(whole.detectors, in_step, detectors_in),
            rules=_part(whole.rules, in_step, rules_in),
        )

    def __bool__(self) -> bool:
        """Whether the policy has a detector or a rule that only alerts."""
        return bool(self.config.detectors or self.config.rules)

    def init(self) -> AlertState:
        """The state before the first step, of NumPy scalars and arrays."""
        return map_leaves(
            _scalar,
            AlertState(
                grace=np.int32(0),
                detectors=tuple(detector.init() for _, detector in self.config.detectors),
                rules=tuple(rules.init(rule) for rule in self.config.rules),
                cause=np.int32(0),
                action=np.int32(0),
                z_loss=np.float32(0),
                alarms=np.int32(0),
            ),
        )

    def step(self, state: AlertState, judged: StepRecord, signals: Signals) -> AlertState:
        """Judges a step that the other part has judged.

        Args:
            state: the state before this step.
            judged: the record of the other part.
            signals: NumPy scalars. `change_expected` is always present.
        """
        present = tuple(value is not None for value in signals)
        others = np.int32(judged.step - 1), np.int32(judged.cause)
        with np.errstate(all="ignore"):  # the core discards invalid values afterwards
            if present not in self._programs:
                self._programs[present] = record(self._step, state, signals, *others)
            return self._programs[present](state, signals, *others)

    def _step(
        self, state: AlertState, signals: Signals, index: Any, other_causes: Any, *, xp: Any
    ) -> AlertState:
        config = self.config
        grace = remaining_grace(config, state.grace, signals.change_expected, xp=xp)
        seen = observe(signals, signals.change_expected, xp=xp)
        detectors, readings = run_detectors(config, state.detectors, seen, grace > 0, xp=xp)
        alarmed, sustained = cause_flags(config, readings, seen, xp=xp)
        rule_states, fired = run_rules(config, state.rules, alarmed, sustained, index, xp=xp)
        cause, z_loss = alarmed | sustained, state.z_loss
        if "loss_spike" in readings:
            z_loss = settle(readings["loss_spike"].z, xp=xp)
        only_here = (cause != 0) & (other_causes == 0)
        return AlertState(
            grace=grace,
            detectors=detectors,
            rules=rule_states,
            cause=cause,
            action=fresh_actions(fired, cause, xp=xp),
            z_loss=z_loss,
            alarms=xp.where(only_here, state.alarms + 1, state.alarms),
        )

    def completed(self, judged: StepRecord, state: AlertState) -> StepRecord:
        """The record of the whole policy, from the other part's record and the state after it."""
        z_loss = float(state.z_loss) if self._scores_loss else judged.z_loss
        return judged._replace(
            cause=judged.cause | Cause(int(state.cause)),
            action=judged.action | Action(int(state.action)),
            z_loss=z_loss,
        )

    def divided(self, whole: EngineState) -> tuple[EngineState, AlertState]:
        """Divides the state of the whole policy. All alarms are counted in the first part."""
        detectors_in, rules_in = self._in_step
        mine = self.init()._replace(
            grace=whole.grace,
            detectors=_part(whole.detectors, False, detectors_in),
            rules=_part(whole.rules, False, rules_in),
            z_loss=whole.last.z_loss,
        )
        other = whole._replace(
            detectors=_part(whole.detectors, True, detectors_in),
            rules=_part(whole.rules, True, rules_in),
        )
        return other, map_leaves(_scalar, mine)

    def joined(self, other: EngineState, mine: AlertState) -> EngineState:
        """The state of the whole policy, of NumPy arrays; the inverse of `divided`."""
        detectors_in, rules_in = self._in_step
        last, tally = other.last, other.tally
        decision = last.decision._replace(
            cause=last.decision.cause | mine.cause, action=last.decision.action | mine.action
        )
        return other._replace(
            detectors=_merged(other.detectors, mine.detectors, detectors_in),
            rules=_merged(other.rules, mine.rules, rules_in),
            tally=tally._replace(alarms=tally.alarms + mine.alarms),
            last=last._replace(
                decision=decision, z_loss=mine.z_loss if self._scores_loss else last.z_loss
            ),
        )


# -- signals on their way to the host -------------------------------------------------------------

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss")
"""Signals that the detectors of this part read, in packing order."""
_CHANGE = 1 << len(SIGNALS)


def signal_numbers(state: EngineState, signals: Signals, *, xp: Any) -> tuple[Any, list[Any]]:
    """The signals of a step as numbers that an adapter copies to the host.

    Args:
        state: the state before the step.
        signals: the signals of the step.
        xp: the array namespace.

    Returns:
        Flags, int32: which signals are present, and whether a change is expected; and one float32
        for each of `SIGNALS`, 0 for an absent signal.
    """
    changes = state.change_expected
    if signals.change_expected is not None:
        changes = changes | signals.change_expected
    values = [getattr(signals, name) for name in SIGNALS]
    present = sum(1 << i for i, value in enumerate(values) if value is not None)
    zero = state.lr.scale - state.lr.scale
    return xp.astype(changes, xp.int32) * _CHANGE + present, [
        zero if value is None else value for value in values
    ]


def unpack_signals(flags: int, values: np.ndarray) -> Signals:
    """The signals from `signal_numbers`; `values` is float32 (4,)."""
    found: Any = {
        name: value
        for i, (name, value) in enumerate(zip(SIGNALS, values, strict=True))
        if flags & 1 << i
    }
    return Signals(**found, change_expected=np.bool_(flags & _CHANGE))


def _part(items: tuple[Any, ...], wanted: bool, in_step: list[bool]) -> tuple[Any, ...]:
    return tuple(each for each, here in zip(items, in_step, strict=True) if here == wanted)


def _merged(other: tuple[Any, ...], mine: tuple[Any, ...], in_step: list[bool]) -> tuple[Any, ...]:
    parts = iter(other), iter(mine)
    return tuple(next(parts[0] if here else parts[1]) for here in in_step)


def _scalar(leaf: Any) -> Any:
    array = np.asarray(leaf)
    return array[()] if array.ndim == 0 else array
