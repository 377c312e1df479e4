"""The policies that come with healcore."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from healcore.policy import diff, load, preset_text
from tests.core.engine_runner import Runner

PRESETS = ("default", "pretraining", "aggressive", "conservative", "observe", "zclip")


def run(policy, losses, norms):
    """Decisions of a policy along a curve, with NumPy."""
    return Runner(policy.config()).feed(loss=losses, grad_norm=norms)


def healthy(steps, seed=0):
    """A healthy run: falling loss, norms with a scatter of ten per cent, below every limit."""
    rng = np.random.default_rng(seed)
    losses = 2 + 3 * np.exp(-np.arange(steps) / 100) + 0.02 * rng.standard_normal(steps)
    return losses, 0.5 * np.exp(0.1 * rng.standard_normal(steps))


@pytest.mark.parametrize("name", PRESETS)
def test_each_has_a_name_a_description_and_references(name):
    policy = load(name)
    assert policy.name == name
    assert policy.description.endswith(".")
    assert policy.references
    written = tomllib.loads(preset_text(name))
    assert "shift" not in written.get("clip", {}), "the escape has the core's defaults"


@pytest.mark.parametrize("name", PRESETS)
def test_a_healthy_run_is_left_alone(name):
    decisions = run(load(name), *healthy(600))
    skipped = sum(bool(d.skip) for d in decisions)
    acted = sum(int(d.action) != 0 for d in decisions)
    assert (skipped, acted) == (0, 0)
    assert all(d.lr_scale == 1 for d in decisions)


@pytest.mark.parametrize("name", ["pretraining", "aggressive", "conservative"])
def test_nans_that_go_on_are_a_rollback_and_a_cut(name):
    losses, norms = healthy(200)
    losses[100:120] = np.nan
    orders = actions(load(name), losses, norms)
    assert ordered(orders, Action.ROLLBACK) == 1
    assert ordered(orders, Action.CUT_LR) == 1


# -- what default does with finite numbers, and pretraining ---------------------------------------


def actions(policy, losses, norms) -> list[int]:
    return [int(d.action) for d in run(policy, losses, norms)]


def ordered(orders: list[int], action: Action) -> int:
    return sum(bool(each & action) for each in orders)


def bad_batches(steps=300):
    """A healthy run with single losses and norms far above the level."""
    losses, norms = healthy(steps)
    losses[150:280:13] += 5.0
    norms[150:280:13] *= 50.0
    return losses, norms


def other_data(steps=400):
    """A run whose loss and norm quadruple at one step and then slowly fall."""
    losses, norms = healthy(steps)
    high = np.exp(-np.arange(steps - 200) / 300)
    losses[200:] += 6.0 * high
    norms[200:] *= 1 + 3 * high
    return losses, norms


def blow_up(steps=240):
    """A run in which each step makes the next one worse."""
    losses, norms = healthy(steps)
    grown = 1.5 ** np.arange(20)
    losses[200:220] += grown
    norms[200:220] *= 1 + 10 * grown
    return losses[:220], norms[:220]


def test_default_skips_no_finite_batch_and_pretraining_does():
    skipped = [sum(bool(d.skip) for d in run(load(name), *bad_batches())) for name in PRESETS[:2]]
    assert skipped[0] == 0
    assert skipped[1] >= 8


def test_default_only_says_that_data_may_be_other_and_pretraining_acts():
    """`default` confirms before it rolls back; `pretraining` does not."""
    assert load("default").rollback.confirm
    assert not load("pretraining").rollback.confirm
    orders = {name: actions(load(name), *other_data()) for name in PRESETS[:2]}
    assert ordered(orders["default"], Action.CUT_LR) == 0
    assert ordered(orders["default"], Action.ALERT) >= 1
    assert ordered(orders["pretraining"], Action.CUT_LR) >= 1
    assert ordered(orders["pretraining"], Action.ROLLBACK) >= 1
    assert not any(ordered(each, Action.STOP) for each in orders.values())


def test_default_warns_of_a_loss_that_blows_up_and_changes_no_finite_step():
    """The host decides about the rate, see `[rollback] confirm`."""
    decisions = run(load("default"), *blow_up())
    first = next(i for i, d in enumerate(decisions) if int(d.cause) & Cause.LOSS_SPIKE)
    assert 200 <= first < 220
    assert int(decisions[first].action) == Action.ALERT
    assert {(float(d.lr_scale), float(d.grad_scale), bool(d.skip)) for d in decisions} == {
        (1.0, 1.0, False)
    }
    assert not load("default").engine().cuts_lr
    assert load("default").engine().limits_lr


def test_aggressive_acts_before_pretraining_before_conservative():
    losses, norms = healthy(400)
    losses[200:] = np.nan
    first = {}
    for name in ("aggressive", "pretraining", "conservative"):
        decisions = run(load(name), losses, norms)
        first[name] = next(i for i, d in enumerate(decisions) if int(d.action) & Action.ROLLBACK)
    assert first["aggressive"] < first["pretraining"] < first["conservative"]


def test_observe_is_default_in_another_mode():
    differing = {d.key for d in diff(load("default"), load("observe"))}
    assert differing == {"name", "description", "references", "mode"}
    losses, norms = healthy(100)
    norms[50] = np.inf
    for decision in run(load("observe"), losses, norms):
        assert not decision.skip
        assert (decision.grad_scale, decision.lr_scale, decision.action) == (1, 1, 0)
