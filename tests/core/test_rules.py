"""When rules fire: in a row, in a window; limits of skips."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.clipping import RULES
from healcore.core.engine import RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching

BAD = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
ROLLBACK = int(Action.ROLLBACK)


def fired(rule: RuleConfig, losses, action: Action = Action.ROLLBACK) -> list[int]:
    """The steps at which a rule on losses that are not finite orders `action`."""
    found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), action)
    return np.flatnonzero(found).tolist()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, -1.0])
def test_a_gradient_that_is_no_number_is_skipped_under_any_policy(wrong):
    for config in (watching("nonfinite"), watching("vanishing")):
        decision = Runner(config).step(loss=1.0, grad_norm=wrong)
        assert decision.skip


def test_each_signal_has_its_cause():
    runner = Runner(watching("nonfinite"))
    assert runner.step(loss=np.nan, grad_norm=1.0).cause == Cause.NONFINITE_LOSS
    assert runner.step(loss=1.0, grad_norm=np.inf).cause == Cause.NONFINITE_GRAD
    assert runner.step(loss=np.inf, grad_norm=np.nan).cause == BAD
    assert runner.step(loss=1.0, grad_norm=1.0, update_norm=np.nan).cause == Cause.NONFINITE_GRAD
    assert runner.step(loss=1.0, grad_norm=1.0).cause == 0


def test_a_loss_that_is_no_number_is_skipped_where_a_rule_orders_it():
    without = Runner(watching("nonfinite")).step(loss=np.nan, grad_norm=1.0)
    skipping = Runner(watching("nonfinite", RuleConfig(BAD, skip=True)))
    assert not without.skip
    assert skipping.step(loss=np.nan, grad_norm=1.0).skip


def test_every_other_step_nan_is_caught_by_the_rate_only():
    """KempnerForge's detector, which counts consecutive steps, misses this for 199 steps."""
    losses = np.where(np.arange(200) % 2, np.nan, 1.0)
    row = RuleConfig(BAD, action=ROLLBACK, consecutive=3)
    rate = RuleConfig(BAD, action=ROLLBACK, count=5, within=20)
    assert not fired(row, losses)
    assert fired(rate, losses)[0] == 9, "at the fifth NaN"


def test_in_a_row():
    rule = RuleConfig(BAD, action=ROLLBACK, consecutive=3)
    losses = [1, np.nan, np.nan, 1, np.nan, np.nan, np.nan, np.nan, 1]
    assert fired(rule, losses) == [6]


def test_a_window_holds_exactly_within_steps():
    rule = RuleConfig(BAD, action=ROLLBACK, count=2, within=10)
    for gap, hit in ((9, True), (10, False)):
        losses = np.ones(40)
        losses[[5, 5 + gap]] = np.nan
        assert bool(fired(rule, losses)) == hit


def test_an_alert_comes_once_until_quiet_steps_have_passed():
    rule = RuleConfig(BAD, action=int(Action.ALERT))
    losses = np.ones(100)
    losses[[10, 11, 12, 20, 60]] = np.nan  # 20 quiet steps lie between the last two only
    assert fired(rule, losses, Action.ALERT) == [10, 60]


SKIP_SPIKES = RuleConfig(int(Cause.GRAD_SPIKE | Cause.NONFINITE_GRAD), skip=True)
SKIPPING = watching("grad_spike", SKIP_SPIKES)._replace(max_skips=4)


def test_a_row_of_outliers_ends_after_max_skips():
    decisions = Runner(SKIPPING).feed(grad_norm=[1.0] * 50 + [100.0] * 10)
    assert [i for i, d in enumerate(decisions) if d.skip] == [50, 51, 52, 53]


def test_a_skipped_step_is_not_clipped_too_and_teaches_the_clip_nothing():
    config = SKIPPING._replace(clip=("zclip", RULES["zclip"]()))
    runner = Runner(config)
    runner.feed(grad_norm=[0.5] * 50)
    before = runner.state.clip
    decision = runner.step(grad_norm=100.0)
    assert decision.skip
    assert decision.grad_scale == 1
    assert runner.state.tally.clips == 0
    for a, b in zip(before[:3], runner.state.clip[:3], strict=True):
        assert a == b
