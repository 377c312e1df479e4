"""The self-healing system for HF and TRL: its table of failures and its thresholds.

Each row of its table is one test. Its rules are an oracle (`originals.SelfHealing`), with which the
detectors are compared where they can express these rules.
"""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from healcore.policy import load
from tests.catalogue.watch import curves
from tests.parity import recorded_runs

originals = pytest.importorskip("tests.catalogue.watch.originals")

SYNTHETIC = curves.synthetic()
PRESETS = {  # NaN in a row, multiple of the mean, steps of divergence, z, recoveries
    "default": (3, 5.0, 50, 3.0, 5),
    "aggressive": (1, 3.0, 20, 2.0, 10),
    "conservative": (10, 10.0, 200, 4.0, 2),
}


@pytest.fixture(params=PRESETS)
def preset(request):
    """(policy, its row of `PRESETS`)."""
    return load(f"self-healing-trl-{request.param}"), PRESETS[request.param]


def quiet(steps=420):
    """A healthy run: losses, norms."""
    norms = 0.5 * np.exp(0.05 * np.random.default_rng(1).standard_normal(steps))
    return curves.healthy(steps, seed=6), norms.astype(np.float32)


# -- its table of failures ------------------------------------------------------------------------


def test_nan_loss_goes_back_and_halves_the_rate(preset):
    policy, (nan, *_) = preset
    losses, norms = quiet()
    losses[300 : 300 + nan], norms[300 : 300 + nan] = np.nan, np.nan
    decisions = curves.decisions_of(policy, losses, norms)
    assert decisions.skip[300 : 300 + nan].all()
    (order,) = np.flatnonzero(decisions.orders(Action.ROLLBACK))
    assert order == 300 + nan - 1
    assert decisions.lr_scale[order:].max() == 0.5
    if nan > 1:
        losses[300 + nan - 1], norms[300 + nan - 1] = 2.0, 0.5
        assert not curves.decisions_of(policy, losses, norms).orders(Action.ROLLBACK).any()


def test_a_loss_spike_is_saved_and_clipped_and_no_more(preset):
    policy, (_, ratio, *_) = preset
    losses, norms = quiet()
    losses[300], norms[300] = losses[200:300].mean() * ratio * 1.01, 8.0
    decisions = curves.decisions_of(policy, losses, norms)
    assert np.flatnonzero(decisions.reports(Cause.LOSS_SPIKE)).tolist() == [300]
    assert decisions.action[300] == int(Action.SAVE | Action.ALERT)
    assert decisions.grad_scale[300] < 0.15
    losses[300] *= 0.98
    assert not curves.decisions_of(policy, losses, norms).reports(Cause.LOSS_SPIKE).any()


def test_divergence_goes_back_and_halves_the_rate(preset):
    policy, (_, _, patience, *_) = preset
    losses, norms = quiet(1200)
    losses[500:] += np.linspace(0, 7, 700).astype(np.float32)
    decisions = curves.decisions_of(policy, losses, norms)
    order = curves.first(decisions.orders(Action.ROLLBACK))
    assert order is not None
    assert 500 < order < 500 + 2 * patience + 120
    assert decisions.orders(Action.CUT_LR)[order]


@pytest.mark.parametrize(
    ("failure", "cause"),
    [
        ("explosion", Cause.GRAD_SPIKE),
        ("vanishing", Cause.GRAD_VANISHING),
        ("chance", Cause.PLATEAU),
        ("overfit", Cause.OVERFIT),
    ],
)
def test_what_needs_a_person_only_alerts(failure, cause):
    """With the default: in what is used here the presets do not differ."""
    policy = load("self-healing-trl-default")
    losses, norms = quiet()
    evals = np.full(len(losses), np.nan, np.float32)
    if failure == "explosion":
        norms[300] = 101.0
    elif failure == "vanishing":
        norms[300:] = 5e-8
    elif failure == "chance":
        losses = (0.693 + 0.005 * np.sin(np.arange(len(losses)))).astype(np.float32)
    else:
        evals[100::50] = 4.5
    decisions = curves.decisions_of(policy, losses, norms, evals)
    assert decisions.reports(cause).any()
    assert set(decisions.action[decisions.action != 0]) == {int(Action.ALERT)}
    assert not decisions.skip.any()


# -- compared with its rules ----------------------------------------------------------------------


def failures(failure, losses, norms=None, **options):
    """The steps at which the original reports a failure."""
    rules = originals.SelfHealing(**options)
    norms = np.ones(len(losses)) if norms is None else norms
    seen = [rules.see(float(loss), float(norm)) for loss, norm in zip(losses, norms, strict=True)]
    return [step for step, found in enumerate(seen) if failure in found]


def same_spikes(losses, ratio):
    """Whether the first spike is the same, and where it is; the original then learns it."""
    policy = load("self-healing-trl-default", detect={"loss_ratio": {"ratio": ratio}})
    ours = np.flatnonzero(curves.decisions_of(policy, losses).reports(Cause.LOSS_SPIKE))
    theirs = failures("loss_spike", losses, loss_spike_factor=ratio)
    return ours[:1].tolist() == theirs[:1], theirs[:1]


@pytest.mark.parametrize("ratio", [1.5, 3.0, 5.0])
def test_the_same_first_loss_spike(ratio):
    answers = {name: same_spikes(losses, ratio) for name, losses in SYNTHETIC.items()}
    assert all(same for same, _ in answers.values()), answers
    assert any(at for _, at in answers.values())


@recorded_runs.needed
@curves.SOME_AND_ALL
def test_the_same_first_loss_spike_on_recorded_runs(most):
    runs = curves.from_runs(300, most)
    assert all(same_spikes(losses, ratio)[0] for losses in runs.values() for ratio in (1.2, 2.0))


def test_the_same_nan_step(preset):
    policy, (patience, *_) = preset
    rng = np.random.default_rng(patience)
    for _ in range(5):
        losses, norms = quiet(260)
        for start in rng.choice(np.arange(110, 250, 70), 2, replace=False):
            losses[start : start + int(rng.integers(1, patience + 2))] = np.nan
        orders = curves.decisions_of(policy, losses, norms).orders(Action.ROLLBACK)
        expected = failures("nan_loss", losses, norms, nan_patience=patience)
        assert curves.first(orders) == next(iter(expected), None)


def test_the_attempts_end_with_a_stop(preset):
    policy, (*_, recoveries) = preset
    losses, norms = quiet(800)
    norms[150:] = np.nan
    decisions = curves.decisions_of(policy, losses, norms)
    assert decisions.orders(Action.ROLLBACK).sum() == recoveries
    assert decisions.orders(Action.STOP).any()
    assert decisions.orders(Action.CUT_LR).sum() <= 4
