"""The self-healing system for HF and TRL, and PaLM's, OPT's and KempnerForge's recipes.

The rules of the first are an oracle (`originals.self_healing`), with which its detectors are
compared where they can express these rules. The others were carried out by people or are a wish
list: what is held here is which orders come, when, and with what behind them.
"""

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.policy import load
from tests.catalogue import curves
from tests.catalogue.watch import originals

pytestmark = pytest.mark.slow  # each policy is replayed beside its original

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
    return curves.healthy(6, steps).loss, norms.astype(np.float32)


def test_nan_loss_goes_back_and_halves_the_rate(preset):
    """At the NaN in a row at which the original reports them; one fewer is only skipped."""
    policy, (nan, *_) = preset
    losses, norms = quiet()
    for start, length in ((200, nan - 1), (300, nan)):
        losses[start : start + length] = norms[start : start + length] = np.nan
    decisions = curves.decisions_of(policy, losses, norms)
    assert np.flatnonzero(decisions.skip).tolist() == np.flatnonzero(np.isnan(losses)).tolist()
    (order,) = np.flatnonzero(decisions.orders(Action.ROLLBACK))
    assert [order] == failures("nan_loss", losses, norms, nan_patience=nan)
    assert decisions.lr_scale[order:].max() == 0.5


def test_a_loss_spike_is_saved_and_clipped_and_no_more(preset):
    policy, (_, ratio, *_) = preset
    losses, norms = quiet()
    losses[300] = losses[200:300].mean() * ratio * 1.01
    norms[300] = 8.0
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
    "cause", [Cause.GRAD_SPIKE, Cause.GRAD_VANISHING, Cause.PLATEAU, Cause.OVERFIT]
)
def test_what_needs_a_person_only_alerts(cause):
    """With the default: in what is used here the presets do not differ."""
    losses, norms = quiet()
    evals = np.full(len(losses), np.nan, np.float32)
    match cause:
        case Cause.GRAD_SPIKE:
            norms[300] = 101.0
        case Cause.GRAD_VANISHING:
            norms[300:] = 5e-8
        case Cause.PLATEAU:
            losses = (0.693 + 0.005 * np.sin(np.arange(len(losses)))).astype(np.float32)
        case Cause.OVERFIT:
            evals[100::50] = 4.5
    decisions = curves.decisions_of("self-healing-trl-default", losses, norms, evals)
    assert decisions.reports(cause).any()
    assert set(decisions.action[decisions.action != 0]) == {int(Action.ALERT)}
    assert not decisions.skip.any()


def failures(failure, losses, norms=None, **options):
    """The steps at which the original reports a failure."""
    norms = np.ones(len(losses)) if norms is None else norms
    seen = originals.self_healing(losses, norms, **options)
    return [step for step, found in enumerate(seen) if failure in found]


def same_spikes(losses, ratio):
    """Whether the first spike is the same, and where it is; the original then learns it."""
    policy = load("self-healing-trl-default", detect={"loss_ratio": {"ratio": ratio}})
    ours = np.flatnonzero(curves.decisions_of(policy, losses).reports(Cause.LOSS_SPIKE))
    theirs = failures("loss_spike", losses, loss_spike_factor=ratio)
    return ours[:1].tolist() == theirs[:1], theirs[:1]


@pytest.mark.parametrize("ratio", [1.5, 3.0, 5.0])
def test_both_find_the_same_first_loss_spike(ratio):
    answers = {name: same_spikes(losses, ratio) for name, losses in curves.SYNTHETIC.items()}
    assert all(same for same, _ in answers.values()), answers
    assert any(at for _, at in answers.values())


def test_the_attempts_end_with_a_stop(preset):
    policy, (*_, recoveries) = preset
    losses, norms = quiet(800)
    norms[150:] = np.nan
    decisions = curves.decisions_of(policy, losses, norms)
    assert decisions.orders(Action.ROLLBACK).sum() == recoveries
    assert decisions.orders(Action.STOP).any()
    assert decisions.orders(Action.CUT_LR).sum() <= 4


def spiked(steps=600, at=400, length=15, height=1.5):
    """A healthy run with one sustained spike, and quiet norms."""
    losses = curves.healthy(4, steps).loss
    losses[at : at + length] += height
    return losses, np.full(steps, 0.2, np.float32)


def test_palm_goes_back_once_for_a_spike_and_touches_nothing_else():
    decisions = curves.decisions_of("palm-rollback", *spiked())
    (order,) = np.flatnonzero(decisions.orders(Action.ROLLBACK))
    assert 400 <= order <= 410
    assert not decisions.orders(Action.CUT_LR).any()
    assert (decisions.lr_scale == 1).all()
    assert not decisions.skip.any()


def test_opt_cuts_the_rate_with_the_rollback():
    """`tests/core/test_engine.py` shows that the cut survives the restored state."""
    decisions = curves.decisions_of("opt-restart", *spiked())
    order = curves.first(decisions.orders(Action.ROLLBACK))
    assert decisions.lr_scale[order] == np.float32(0.67)


def test_kempner_retries_are_bounded_and_the_last_one_stops():
    """Norms of NaN are skipped; the tenth in a row rolls back and cuts the rate."""
    losses, norms = spiked(steps=1000, at=1000)
    norms[100:] = np.nan
    decisions = curves.decisions_of("kempnerforge", losses, norms)
    assert decisions.skip[100:].all()
    orders = np.flatnonzero(decisions.orders(Action.ROLLBACK))
    assert (orders[0], len(orders)) == (109, 3)
    assert curves.first(decisions.orders(Action.CUT_LR)) == 109
    assert np.flatnonzero(decisions.orders(Action.STOP))[0] > orders[-1]


def test_kempner_gradient_anomalies_are_seen_in_the_step():
    losses, norms = spiked(at=600)
    norms *= np.exp(0.05 * np.random.default_rng(0).standard_normal(len(norms))).astype(np.float32)
    norms[300] = 5.0
    decisions = curves.decisions_of("kempnerforge", losses, norms)
    assert np.flatnonzero(decisions.skip).tolist() == [300]
    assert not decisions.orders(Action.ROLLBACK).any()
