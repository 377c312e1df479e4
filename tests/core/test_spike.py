"""Spikes of the loss, the gradient norm and the update norm: one bad value, and several."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from healcore.core.engine import IncidentConfig
from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, alarms, ordered, sustained, watching

SPIKE = Cause.LOSS_SPIKE
CONFIG = watching("loss_spike", sustained(SPIKE))
LANES = 60


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def run(losses: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks ordered), (steps, lanes)."""
    losses = np.asarray(losses, np.float32)
    runner = Runner(CONFIG, lanes=losses.shape[1] if losses.ndim == 2 else 0)
    decisions = runner.feed(loss=losses)
    return alarms(decisions, SPIKE), ordered(decisions, Action.ROLLBACK)


# Loss = offset + unit * noise: positive, near zero, negative, tiny, huge.
UNITS = {
    "ordinary": (2.5, 0.05),
    "near zero": (0.0, 0.01),
    "negative": (-4.0, 0.1),
    "crossing zero": (0.01, 0.1),
    "tiny": (1e-6, 1e-7),
    "huge": (1e9, 1e7),
}


def in_every_unit(shape: np.ndarray) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """(unit, alarms, rollbacks ordered) for each unit: side by side as lanes of one run."""
    every = [offset + scale * shape for offset, scale in UNITS.values()]
    found = run(np.concatenate(every, axis=1))
    yield from zip(UNITS, *(np.split(x, len(UNITS), axis=1) for x in found), strict=True)


def test_noise_is_no_spike():
    for unit, single, lasting in in_every_unit(noise(1000)):
        assert single.mean() < 1e-3, f"{unit}: single steps: fewer than one in a thousand"
        assert not lasting.any(), unit


def test_a_lasting_rise_is_found_within_ten_steps():
    shape = noise(600)
    shape[400:440] += 20
    for unit, _, lasting in in_every_unit(shape):
        assert not lasting[:400].any(), unit
        assert lasting[400:410].any(0).all(), unit


def test_one_bad_batch_is_an_alarm_and_never_a_rollback():
    shape = noise(600)
    shape[400] += 30
    for unit, single, lasting in in_every_unit(shape):
        assert single[400].all(), unit
        assert not lasting.any(), unit
        assert single[401:450].mean() < 0.01, f"{unit}: the step after it is fine again"


def test_a_high_row_that_comes_again_and_again_is_the_runs_own_noise():
    """As in runs whose every dozenth logged batch comes from another source (ogbg, resnet)."""
    periods, runs = (9, 13, 18), []
    for period in periods:
        losses = 1.0 + 0.05 * noise(2000)
        height = np.linspace(1.0, 2.0, 2000)[:, None] + 0.1 * noise(2000, seed=1)
        losses[200::period] += height[200::period]
        above = losses.copy()
        above[1500:1530] += 6.0
        runs += [losses, above]
    found = run(np.concatenate(runs, axis=1))
    single, lasting = (np.split(x, len(runs), axis=1) for x in found)
    for k, period in enumerate(periods):
        assert not lasting[2 * k][400:].any(), period
        assert single[2 * k][600:].mean() < 0.01, f"{period}: and it is not skipped either"
        assert lasting[2 * k + 1][1500:1512].any(0).all(), f"{period}: it hides no spike above it"


def test_a_power_of_two_as_unit_changes_nothing():
    """Scaling the loss changes no bit."""
    losses = (2.5 + 0.1 * noise(300)).astype(np.float32)
    losses[200:] += 1
    for factor in (2.0**-10, 2.0**10):
        np.testing.assert_array_equal(run(losses)[0], run(losses * np.float32(factor))[0])


@pytest.mark.parametrize("value", [0.0, 0.6931472, 3.0, -2.0, 1e-8])
def test_constant_losses(value):
    single, lasting = run(np.full((300, 1), value))
    assert not single.any()
    assert not lasting.any()
    nearly = np.full((300, 1), value)
    nearly[200:] *= 1.0001
    single, lasting = run(nearly)
    assert not lasting.any(), "a hundredth of a percent more"


def test_a_falling_loss_is_no_spike():
    t = np.arange(2000)[:, None]
    losses = 2 + 9 * np.exp(-t / 300) + 0.05 * noise(2000)
    single, lasting = run(losses)
    assert single.mean() < 2e-3
    assert not lasting.any()


def test_a_climb_of_thirty_steps_soon_after_the_first_descent_is_found():
    """A climb too slow for a spike and too short for a divergence, with growing noise."""
    t = np.arange(300)[:, None]
    losses = 2 + 4 * np.exp(-t / 25) + 0.05 * noise(300)
    assert not run(losses)[1].any()
    excess = np.zeros(300)
    excess[140:250] = 1.5 * np.minimum(np.arange(1, 111) / 30, 1)
    _, lasting = run(losses + excess[:, None] * (1 + 0.2 * noise(300, seed=2)))
    assert lasting[140:250].any(0).mean() > 0.8


def lasts(losses: np.ndarray) -> np.ndarray:
    """At which steps the spike lasts, by a rule that fires at each of them."""
    losses = np.asarray(losses, np.float32)
    rule = CONFIG.rules[0]._replace(action=int(Action.ALERT))  # whose firings are counted
    incident = IncidentConfig(quiet_steps=1, patience=1)
    runner = Runner(CONFIG._replace(rules=(rule,), incident=incident), lanes=LANES)
    lasting = []
    for loss in losses:
        runner.step(loss=loss)
        lasting.append(runner.state.rules[0].age == 0)
    return np.array(lasting)


def test_a_step_that_is_at_the_level_orders_nothing_within_an_incident():
    losses = 2.5 + 0.05 * noise(600)
    losses[400:430] += 2.0
    losses[[412, 413, 420]] -= 2.0
    lasting = lasts(losses)
    assert lasting[408:412].all()
    assert not lasting[[412, 413, 420]].any(), "the loss has come back"
    assert lasting[[414, 415, 416, 421, 422]].all(), (
        "the incident goes on: no new evidence is needed"
    )
    assert not lasting[430:].any()


def test_nan_and_inf_teach_nothing():
    losses = (2.5 + 0.05 * noise(500)).astype(np.float32)
    clean = run(losses)
    for wrong in (np.nan, np.inf, -np.inf):
        faulty = np.insert(losses, [5, 100, 100, 250], wrong, axis=0)
        keep = np.isfinite(faulty[:, 0])
        for a, b in zip(clean, run(faulty), strict=True):
            np.testing.assert_array_equal(a, b[keep])
            assert not b[~keep].any()


def test_a_true_level_shift_is_accepted_in_the_end():
    """A change of dataset opens one incident, and then the new level is learnt."""
    losses = 2.0 + 0.05 * noise(1500)
    losses[500:] += 3.0
    single, lasting = run(losses)
    assert lasting[500:520].any(0).all()
    assert not lasting[700:].any()
    assert single[700:].mean() < 2e-3


def test_a_rounded_loss_has_its_grid_as_noise():
    """A log with two digits of a loss of 0.05: most values repeat, the others are a fifth off."""
    single, lasting = run(np.round(0.05 * (1 + 0.1 * noise(2000)), 2))
    assert single.mean() < 1e-3
    assert lasting.mean() < 1e-3


def test_a_mix_of_two_sources_is_the_runs_own_noise():
    """One batch in seven has 20 times the loss: not skipped, and sustained in 1 % of steps."""
    rare = np.random.default_rng(3).random((3000, LANES)) < 0.15
    single, lasting = run(np.where(rare, 20.0, 1.0) * (1 + 0.1 * noise(3000)))
    assert single.mean() < 5e-3
    assert lasting[300:].mean() < 1e-2


NORM_LANES = 100
KINDS = {
    "grad_spike": ("grad_norm", Cause.GRAD_SPIKE),
    "update_spike": ("update_norm", Cause.UPDATE_SPIKE),
}


def norms(steps: int, spread: float = 0.3) -> np.ndarray:
    return np.exp(spread * np.random.default_rng(0).normal(size=(steps, NORM_LANES)))


def run_norms(kind: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks)."""
    signal, cause = KINDS[kind]
    runner = Runner(watching(kind, sustained(cause)), lanes=values.shape[1])
    # The update spike has no use for a loss, but a step needs a loss or a gradient norm.
    both = {"loss": np.ones_like(values), signal: values}
    decisions = runner.feed(**both)
    return alarms(decisions, cause), ordered(decisions, Action.ROLLBACK)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_is_one_alarm_at_any_scale(kind, scale):
    values = norms(300, 0.1)
    values[200] = 20
    single, lasting = run_norms(kind, scale * values)
    assert single[200].all()
    assert not np.delete(single, 200, axis=0).any()
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_noise_and_small_shifts_are_none(kind):
    # Spread of lognormal norms, and how many steps of a thousand may pass for spikes.
    spreads = {0.0: 0, 1e-4: 0, 0.1: 0, 0.3: 0.2, 0.5: 3}
    values = np.concatenate([norms(1000, spread) for spread in spreads], axis=1)
    values[500:] *= 1.5
    single, lasting = run_norms(kind, values)
    by_spread = np.split(single, len(spreads), axis=1)
    for (spread, per_mille), found in zip(spreads.items(), by_spread, strict=True):
        assert 1000 * found.mean() <= per_mille, spread
    assert not lasting.any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_explosion_is_sustained_before_it_overflows(kind):
    """BLOOM-176B's norms grew about fourfold per iteration towards the loss peak."""
    values = norms(260)
    values[250:] *= (4.0 ** np.arange(1, 11))[:, None]
    single, lasting = run_norms(kind, values)
    assert single[252:].all()
    assert lasting[250:257].any(0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_lasting_level_is_accepted(kind):
    values = norms(600, 0.1)
    values[200:] *= 30
    single, lasting = run_norms(kind, values)
    assert lasting[200:210].any(0).all()
    assert not single[280:].any(), "two windows"


@pytest.mark.parametrize("at", [5, 24])
@pytest.mark.parametrize("kind", KINDS)
def test_a_spike_in_warm_up_does_not_blind(kind, at):
    values = norms(120, 0.1)
    values[at] = 1e4
    values[60] = 20
    assert run_norms(kind, values)[0][60].all()


@pytest.mark.parametrize("kind", KINDS)
def test_zeros_and_non_numbers_teach_nothing(kind):
    values = norms(300)
    values[200] = 20
    clean = run_norms(kind, values)[0]
    for wrong in (0.0, np.nan, np.inf):
        faulty = np.insert(values, [3, 50, 50, 150], wrong, axis=0)
        keep = np.delete(np.arange(304), [3, 51, 52, 153])
        np.testing.assert_array_equal(run_norms(kind, faulty)[0][keep], clean)


def test_an_update_spike_with_steady_gradients():
    """Marin 32B: update norms jumped while clipped gradients stayed steady."""
    runner = Runner(watching("update_spike"))
    steady = np.ones(100)
    updates = 1e-3 * np.ones(100)
    updates[80] = 0.1
    decisions = runner.feed(grad_norm=steady, update_norm=updates)
    assert np.flatnonzero(alarms(decisions, Cause.UPDATE_SPIKE)).tolist() == [80]
