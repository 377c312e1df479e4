"""The policies that come with healcore."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from healcore.core.signals import Signals
from healcore.core.verdict import Action, Cause
from healcore.policy import diff, fingerprint, load, preset_names, preset_text

PRESETS = ("default", "aggressive", "conservative", "observe", "zclip")


def run(policy, losses, norms):
    """Decisions of a policy along a curve, with NumPy."""
    engine = policy.engine()
    state, decisions = engine.init(), []
    for loss, norm in zip(losses, norms, strict=True):
        signals = Signals(loss=np.float32(loss), grad_norm=np.float32(norm))
        state, decision = engine.step(state, signals, xp=np)
        decisions.append(decision)
    return decisions


def calm(steps, seed=0):
    """A healthy run: falling loss, norms with a scatter of ten per cent, below every limit."""
    rng = np.random.default_rng(seed)
    losses = 2 + 3 * np.exp(-np.arange(steps) / 100) + 0.02 * rng.standard_normal(steps)
    return losses, 0.5 * np.exp(0.1 * rng.standard_normal(steps))


def test_names():
    assert preset_names() == PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_each_says_what_it_is(name):
    policy = load(name)
    assert policy.name == name
    assert policy.description.endswith(".")
    assert policy.references
    written = tomllib.loads(preset_text(name))
    assert "shift" not in written["clip"], "a preset leaves the escape to the core's defaults"


@pytest.mark.parametrize("name", PRESETS)
def test_a_nonfinite_gradient_is_never_applied(name):
    losses, norms = calm(60)
    norms[40] = np.nan
    decision = run(load(name), losses, norms)[40]
    assert decision.cause == Cause.NONFINITE_GRAD
    assert bool(decision.skip) is (load(name).mode == "heal")


@pytest.mark.parametrize("name", PRESETS)
def test_a_healthy_run_is_left_alone(name):
    decisions = run(load(name), *calm(600))
    skipped = sum(bool(d.skip) for d in decisions)
    acted = sum(int(d.action) != 0 for d in decisions)
    assert (skipped, acted) == (0, 0)
    assert all(d.lr_scale == 1 for d in decisions)


@pytest.mark.parametrize("name", ["default", "aggressive", "conservative"])
def test_nans_that_go_on_are_a_rollback_and_a_cut(name):
    losses, norms = calm(200)
    losses[100:120] = np.nan
    actions = [int(d.action) for d in run(load(name), losses, norms)]
    assert sum(bool(a & Action.ROLLBACK) for a in actions) == 1
    assert sum(bool(a & Action.CUT_LR) for a in actions) == 1


def test_every_other_step_nan_is_seen():
    losses, norms = calm(200)
    norms[100:200:2] = np.nan
    assert any(int(d.action) & Action.ROLLBACK for d in run(load("default"), losses, norms))


def test_aggressive_acts_before_default_before_conservative():
    losses, norms = calm(400)
    losses[200:] = np.nan
    first = {}
    for name in ("aggressive", "default", "conservative"):
        decisions = run(load(name), losses, norms)
        first[name] = next(i for i, d in enumerate(decisions) if int(d.action) & Action.ROLLBACK)
    assert first["aggressive"] < first["default"] < first["conservative"]


def test_observe_is_default_in_another_mode():
    differing = {d.key for d in diff(load("default"), load("observe"))}
    assert differing == {"name", "description", "references", "mode"}
    losses, norms = calm(100)
    norms[50] = np.inf
    for decision in run(load("observe"), losses, norms):
        assert not decision.skip
        assert (decision.grad_scale, decision.lr_scale, decision.action) == (1, 1, 0)


def test_zclip_is_the_published_rule():
    policy = load("zclip")
    zclip = policy.clip
    assert zclip.kind == "zclip"
    assert (zclip.z_threshold, zclip.ema_decay, zclip.warmup_steps) == (2.5, 0.97, 25)
    assert (zclip.target, zclip.max_norm) == ("reciprocal", 1.0)
    assert not policy.engine().cuts_lr


def test_fingerprints_tell_presets_apart_and_ignore_words():
    assert len({fingerprint(load(name)) for name in PRESETS}) == len(PRESETS)
    renamed = load("default").model_copy(update={"name": "x", "description": "y"})
    assert fingerprint(renamed) == fingerprint(load("default"))
