"""The part of a policy that only alerts: both parts together decide as the whole policy does."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core import host, step_record
from healcore.core.engine import Engine
from healcore.core.engine.config import RuleConfig
from healcore.core.signals import Signals
from healcore.core.tree import leaves, map_leaves
from healcore.core.verdict import Action, Cause
from healcore.policy import engine_of

PRESETS = ["default", "pretraining", "conservative", "aggressive", "observe", "adagc", "zclip"]
NUMBERS = st.sampled_from([0.01, 0.5, 1.0, 1.1, 1.3, 2.0, 30.0, 1e4, float("nan"), float("inf")])
STEPS = st.lists(
    st.tuples(NUMBERS, NUMBERS, st.sampled_from([False] * 9 + [True])), min_size=30, max_size=150
)


def bits(state: object) -> list[bytes]:
    """The bits of every number of a state."""
    return [np.asarray(leaf).tobytes() for leaf in leaves(state)]


@pytest.mark.parametrize("preset", PRESETS)
@settings(max_examples=25, deadline=None)
@given(steps=STEPS)
def test_two_parts_decide_as_the_whole(preset: str, steps: list[tuple[float, float, bool]]) -> None:
    """States and records are equal after every step, after a rollback, and after a round trip."""
    engine = engine_of(preset)
    scalar = lambda leaf: leaf[()] if leaf.ndim == 0 else leaf  # noqa: E731
    whole = map_leaves(scalar, engine.init(groups=2))
    here, there = engine.alerts.divided(whole)
    saved = whole
    for number, (loss, norm, changes) in enumerate(steps):
        signals = Signals(
            loss=np.float32(loss),
            grad_norm=np.float32(norm),
            group_norms=np.full(2, norm, np.float32) if engine.per_tensor else None,
            update_norm=np.float32(norm) if "update_norm" in engine.needs else None,
            change_expected=np.bool_(changes),
            learning_rate=np.float32(1e-3) if engine.limits_lr else None,
        )
        with np.errstate(all="ignore"):
            whole, decision = engine.step(whole, signals, xp=host)
            here, other = engine.in_step.step(here, signals, xp=host)
        for name in ("grad_scale", "skip", "lr_scale", "rollback_depth"):
            assert bits(getattr(decision, name)) == bits(getattr(other, name)), name
        record = step_record.to_host(step_record.numbers(here))
        there = engine.alerts.step(there, record, signals)
        expected = step_record.to_host(step_record.numbers(whole))
        assert str(engine.alerts.completed(record, there)) == str(expected)
        assert bits(engine.alerts.joined(here, there)) == bits(whole)
        if number == 20:
            saved = whole
        if expected.action & Action.ROLLBACK:
            whole = map_leaves(np.asarray, engine.on_rollback(whole, saved, xp=np))
            here, there = engine.alerts.divided(whole)


def test_divides_the_default_policy() -> None:
    """Under `default` only non-finite values change a step."""
    alerts = engine_of("default").alerts
    assert [name for name, _ in alerts.step_config.detectors] == ["nonfinite"]
    assert all(rule.skip or rule.action & Action.ROLLBACK for rule in alerts.step_config.rules)
    assert "loss_spike" in [name for name, _ in alerts.config.detectors]


def test_a_rule_with_an_acting_cause_stays_whole() -> None:
    """All causes of a rule run in one place, even where one of them changes no step."""
    config = engine_of("default").config
    mixed = RuleConfig(int(Cause.NONFINITE_LOSS | Cause.LOSS_SPIKE), action=int(Action.ALERT))
    alerts = Engine(config._replace(rules=(*config.rules, mixed))).alerts
    assert [name for name, _ in alerts.step_config.detectors] == ["nonfinite", "loss_spike"]
    assert mixed in alerts.step_config.rules


def test_clipping_per_tensor_is_not_divided() -> None:
    """The host does not get the norm of each tensor."""
    engine = engine_of("default", {"clip": {"kind": "adagc"}})
    assert not engine.alerts
    assert engine.in_step is engine
