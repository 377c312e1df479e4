"""When rules fire: in a row, in a window; limits of skips; soft steps."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.clipping import ZClipConfig
from healcore.core.engine import LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching

BAD = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
ROLLBACK = int(Action.ROLLBACK)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf, 3e38, -1.0])
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
    assert not ordered(Runner(watching("nonfinite", row)).feed(loss=losses), Action.ROLLBACK).any()
    found = ordered(Runner(watching("nonfinite", rate)).feed(loss=losses), Action.ROLLBACK)
    assert np.flatnonzero(found)[0] == 9, "at the fifth NaN"


def test_in_a_row():
    rule = RuleConfig(BAD, action=ROLLBACK, consecutive=3)
    losses = [1, np.nan, np.nan, 1, np.nan, np.nan, np.nan, np.nan, 1]
    found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), Action.ROLLBACK)
    assert np.flatnonzero(found).tolist() == [6]


def test_the_window_forgets():
    rule = RuleConfig(BAD, action=ROLLBACK, count=3, within=10)
    losses = np.ones(60)
    losses[[0, 8, 16, 24, 40, 44, 49]] = np.nan
    found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), Action.ROLLBACK)
    assert np.flatnonzero(found).tolist() == [49]


def test_a_window_holds_exactly_within_steps():
    rule = RuleConfig(BAD, action=ROLLBACK, count=2, within=10)
    for gap, hit in ((9, True), (10, False)):
        losses = np.ones(40)
        losses[[5, 5 + gap]] = np.nan
        found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), Action.ROLLBACK)
        assert found.any() == hit


def test_an_alert_comes_once_until_quiet_steps_have_passed():
    rule = RuleConfig(BAD, action=int(Action.ALERT))
    losses = np.ones(100)
    losses[[10, 11, 12, 20, 60]] = np.nan  # 20 quiet steps lie between the last two only
    found = ordered(Runner(watching("nonfinite", rule)).feed(loss=losses), Action.ALERT)
    assert np.flatnonzero(found).tolist() == [10, 60]


SKIP_SPIKES = RuleConfig(int(Cause.GRAD_SPIKE | Cause.NONFINITE_GRAD), skip=True)
SKIPPING = watching("grad_spike", SKIP_SPIKES)._replace(max_skips=4)


def skips(norms) -> list[int]:
    return [i for i, d in enumerate(Runner(SKIPPING).feed(grad_norm=norms)) if d.skip]


def test_a_row_of_outliers_ends_after_max_skips():
    assert skips([1.0] * 50 + [100.0] * 10) == [50, 51, 52, 53]


def test_a_healthy_step_begins_a_new_row():
    norms = [1.0] * 50 + [100.0] * 6 + [1.0] + [100.0] * 2
    assert skips(norms) == [50, 51, 52, 53, 57, 58]


def test_nonfinite_steps_are_skipped_without_limit_and_not_counted():
    assert skips([1.0] * 50 + [np.nan] * 30) == list(range(50, 80))
    norms = [1.0] * 50 + [100.0] * 2 + [np.inf] * 5 + [100.0] * 4
    assert skips(norms) == list(range(50, 59))


def test_a_skipped_step_is_not_clipped_too_and_teaches_the_clip_nothing():
    from healcore.core.clipping import RULES

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


SOFT = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.SOFT_STEP))
SOFTENING = watching("grad_spike", SOFT)._replace(max_skips=4, lr=LrConfig(soft_step=0.25))
NORMS = [1.0, 1.1, 0.9, 1.0, 1.05] * 10


def scales(config, norms) -> list[float]:
    return [float(d.lr_scale) for d in Runner(config).feed(grad_norm=norms)]


def test_only_the_update_of_that_step_is_scaled():
    found = scales(SOFTENING, [*NORMS, 100.0, 1.0, 1.0])
    assert found == [1.0] * 50 + [0.25, 1.0, 1.0]


def test_a_row_ends_after_max_skips_and_skips_count_with_it():
    assert scales(SOFTENING, NORMS + [100.0] * 7)[50:] == [0.25] * 4 + [1.0] * 3
    nan = RuleConfig(int(Cause.GRAD_SPIKE), skip=True, count=1, within=1, consecutive=3)
    decisions = Runner(SOFTENING._replace(rules=(SOFT, nan))).feed(grad_norm=NORMS + [100.0] * 6)
    assert [bool(d.skip) for d in decisions[50:]] == [False, False, True, True, False, False]
    soft = ordered(decisions, Action.SOFT_STEP)[50:]
    assert soft.tolist() == [True, True, False, False, False, False]
    assert [float(d.lr_scale) for d in decisions[50:]] == [0.25, 0.25, 1.0, 1.0, 1.0, 1.0]


def test_the_clipping_rule_does_not_learn_the_spike_and_still_clips_it():
    clip = ("zclip", ZClipConfig(max_norm=None))
    runner = Runner(SOFTENING._replace(clip=clip))
    runner.feed(grad_norm=NORMS)
    before = runner.state.clip
    decision = runner.step(grad_norm=100.0)
    assert decision.lr_scale == 0.25
    assert decision.grad_scale < 0.1
    for a, b in zip(before, runner.state.clip, strict=True):
        np.testing.assert_array_equal(a, b)


def test_it_multiplies_the_cut_in_force_and_does_not_touch_it():
    cut = RuleConfig(int(Cause.NONFINITE_GRAD), skip=True, action=int(Action.CUT_LR))
    config = watching("grad_spike", SOFT, cut)
    nonfinite = watching("nonfinite").detectors
    config = config._replace(
        detectors=(*nonfinite, *config.detectors), lr=LrConfig(factor=0.5, soft_step=0.25)
    )
    found = scales(config, [*NORMS, np.nan, 1.0, 100.0, 1.0])
    assert found[50:] == [0.5, 0.5, 0.125, 0.5]


def test_a_true_shift_of_the_level_ends_it():
    found = scales(SOFTENING._replace(max_skips=1 << 20), NORMS + [8.0, 8.4, 7.8] * 60)
    soft = np.flatnonzero(np.array(found) < 1)
    assert 5 <= len(soft) < 60
    assert soft[-1] < 50 + 60


def test_an_incident_opens_and_observe_mode_changes_nothing():
    runner = Runner(SOFTENING)
    runner.feed(grad_norm=[*NORMS, 100.0])
    assert runner.state.incident.number == 1
    observed = Runner(SOFTENING._replace(mode="observe"))
    decision = observed.feed(grad_norm=[*NORMS, 100.0])[-1]
    assert (decision.lr_scale, decision.action) == (1, 0)
    assert observed.state.last.decision.action & Action.SOFT_STEP
