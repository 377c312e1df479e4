"""A soft step: one update is scaled, nothing lasts, and no baseline of the clipping learns it."""

from __future__ import annotations

import numpy as np

from healcore.core.clipping import ZClipConfig
from healcore.core.engine import LrConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, ordered, watching

SOFT = RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.SOFT_STEP))
CONFIG = watching("grad_spike", SOFT)._replace(max_skips=4, lr=LrConfig(soft_step=0.25))
NORMS = [1.0, 1.1, 0.9, 1.0, 1.05] * 10


def scales(config, norms) -> list[float]:
    return [float(d.lr_scale) for d in Runner(config).feed(grad_norm=norms)]


def test_only_the_update_of_that_step_is_scaled():
    found = scales(CONFIG, [*NORMS, 100.0, 1.0, 1.0])
    assert found == [1.0] * 50 + [0.25, 1.0, 1.0]


def test_a_row_ends_after_max_skips_and_skips_count_with_it():
    assert scales(CONFIG, NORMS + [100.0] * 7)[50:] == [0.25] * 4 + [1.0] * 3
    nan = RuleConfig(int(Cause.GRAD_SPIKE), skip=True, count=1, within=1, consecutive=3)
    decisions = Runner(CONFIG._replace(rules=(SOFT, nan))).feed(grad_norm=NORMS + [100.0] * 6)
    assert [bool(d.skip) for d in decisions[50:]] == [False, False, True, True, False, False]
    soft = ordered(decisions, Action.SOFT_STEP)[50:]
    assert soft.tolist() == [True, True, False, False, False, False]
    assert [float(d.lr_scale) for d in decisions[50:]] == [0.25, 0.25, 1.0, 1.0, 1.0, 1.0]


def test_the_clipping_rule_does_not_learn_the_spike_and_still_clips_it():
    clip = ("zclip", ZClipConfig(max_norm=None))
    runner = Runner(CONFIG._replace(clip=clip))
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
    found = scales(CONFIG._replace(max_skips=1 << 20), NORMS + [8.0, 8.4, 7.8] * 60)
    soft = np.flatnonzero(np.array(found) < 1)
    assert 5 <= len(soft) < 60
    assert soft[-1] < 50 + 60


def test_an_incident_opens_and_observe_mode_changes_nothing():
    runner = Runner(CONFIG)
    runner.feed(grad_norm=[*NORMS, 100.0])
    assert runner.state.incident.number == 1
    observed = Runner(CONFIG._replace(mode="observe"))
    decision = observed.feed(grad_norm=[*NORMS, 100.0])[-1]
    assert (decision.lr_scale, decision.action) == (1, 0)
    assert observed.state.last.decision.action & Action.SOFT_STEP
