"""What the detectors promise about spikes, noise, new levels, NaN and slow faults.

Many runs are the lanes of one: a detector never sees another lane. The exact rules are those of the
reference, see `test_reference`.
"""

import itertools

import numpy as np
import pytest

from healcore.core.decision import Action
from healcore.core.detectors import DETECTORS
from healcore.core.engine import RuleConfig
from tests.core.engine_runner import Runner, flags, watching

LANES = 60
SPIKES = "loss_window", "grad_spike", "grad_window", "grad_ema"
BOUNDS = {"grad_spike": 80, "grad_window": 40, "grad_ema": 25}
"""Steps of a lasting rise of x30 until it is accepted; of the windows 30 to 33 were measured."""


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def judged(name: str, settings: dict, **signals) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks ordered), each (steps,) or (steps, lanes) as the signals."""
    given = {signal: np.asarray(values, np.float32) for signal, values in signals.items()}
    _, *lanes = next(iter(given.values())).shape
    cause = DETECTORS[name].CAUSE
    lasting = RuleConfig(int(cause), action=int(Action.ROLLBACK), sustained=True)
    runner = Runner(watching(name, lasting, **settings), lanes=sum(lanes))
    decisions = runner.feed(**given)
    return flags(decisions, cause), flags(decisions, Action.ROLLBACK)


def watched(name: str, settings: dict, **signals) -> np.ndarray:
    return judged(name, settings, **signals)[0]


def run(name: str, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The same for a detector with one signal, and its own settings."""
    (signal,) = DETECTORS[name].NEEDS
    # The update spike has no use for a loss, but a step needs a loss or a gradient norm.
    return judged(name, {}, **{"loss": np.ones_like(values), signal: values})


@pytest.mark.parametrize("name", SPIKES)
def test_a_spike_is_one_alarm_at_any_scale(name):
    values = np.exp(0.1 * noise(300))
    values[200] = 40
    found, lasting = run(name, np.concatenate([values * unit for unit in (1e-6, 1, 1e6)], axis=1))
    assert found[200].all()
    assert not np.delete(found, 200, axis=0).any()
    assert not lasting.any()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_lasting_level_is_accepted_within_the_bound(name):
    values = np.exp(0.1 * noise(700))
    values[300:] *= 30
    found, lasting = run(name, values)
    assert not found[:300].any()
    assert found[300].all()
    assert not found[300 + BOUNDS[name] :].any()
    assert lasting[300:310].any(0).all()


def test_noise_and_small_shifts_of_norms_are_no_spikes():
    # Spread of lognormal norms, and how many steps of a thousand may pass for spikes.
    allowed = {0.0: 0, 1e-4: 0, 0.1: 0, 0.3: 0.2, 0.5: 3}
    values = np.concatenate([np.exp(spread * noise(1000)) for spread in allowed], axis=1)
    values[500:] *= 1.5
    found, lasting = run("grad_spike", values)
    assert (1000 * found.reshape(1000, -1, LANES).mean((0, 2)) <= [*allowed.values()]).all()
    assert not lasting.any()


def test_an_absolute_ceiling_needs_no_history():
    settings = {"ceiling": 100.0}
    found = watched("grad_ceiling", settings, grad_norm=[200.0, 50.0, 100.0, 101.0])
    assert found.tolist() == [True, False, False, True]


# Loss = offset + unit * noise: positive, near zero, negative, crossing zero, tiny, huge.
UNITS = [(2.5, 0.05), (0.0, 0.01), (-4.0, 0.1), (0.01, 0.1), (1e-6, 1e-7), (1e9, 1e7)]


def test_a_bad_batch_is_an_alarm_and_a_lasting_rise_is_found_within_ten_steps():
    shape = noise(1000)
    shape[400] += 30
    shape[800:840] += 20
    losses = np.concatenate([offset + unit * shape for offset, unit in UNITS], axis=1)
    single, lasting = run("loss_spike", losses)
    of_units = single.reshape(1000, len(UNITS), LANES)
    assert (of_units[:400].mean((0, 2)) < 1e-3).all(), "noise is no spike"
    assert single[400].all()
    assert (of_units[401:450].mean((0, 2)) < 0.01).all(), "the step after a bad batch is fine"
    assert not lasting[:800].any()
    assert lasting[800:810].any(0).all()


@pytest.mark.slow
def test_a_rise_diverges_whatever_its_noise():
    """The published rule never finds the ramps. The noise of the other losses rises with them."""
    ramp = 2 + np.r_[np.zeros(400), np.linspace(0, 20, 1000)]
    losses = [ramp[:, None] + spread * noise(1400) for spread in (0.05, 0.5, 1.0)]
    for times, share in [(3.0, 0.05), (3.0, 0.15), (10.0, 0.3), (30.0, 0.3)]:
        level = 2.0 * np.r_[np.ones(400), np.geomspace(1, times, 600), np.full(400, times)]
        losses.append(level[:, None] * np.exp(share * noise(1400)))
    found, _ = run("divergence", np.concatenate(losses, axis=1))
    assert not found[:400].any()
    assert found[400:1100].any(0).all()


@pytest.mark.slow
def test_noise_and_a_spike_that_heals_do_not_diverge():
    levels = np.linspace(8.0, 1.0, 3000)[:, None], np.full((3000, 1), 2.0)
    shares = (0.05, 0.15, 0.3, 0.5)
    losses = [level * np.exp(share * noise(3000)) for share in shares for level in levels]
    losses += [offset + noise(3000) for offset in (2.0, 0.0, -3.0)]
    healed = 2.5 + 0.05 * noise(3000)
    healed[500:530] += 5 * np.exp(-np.arange(30) / 8)[:, None]
    assert not run("divergence", np.concatenate([*losses, healed], axis=1))[0].any()


def one_noise(steps: int) -> np.ndarray:
    return np.random.default_rng(2).normal(size=steps)


def test_vanishing_norms_raise_an_alarm_after_patience_steps_in_a_row():
    """Norms that vanish for a few steps only are no alarm."""
    norms = [1.0] * 50 + [1e-9] * 10 + [np.nan] * 30 + [1e-9] * 20 + [1.0] * 5
    found = watched("vanishing", {"threshold": 1e-6, "patience": 20}, grad_norm=norms)
    assert np.flatnonzero(found).tolist() == [*range(99, 110)], "NaN counts nothing, resets nothing"


PLATEAU = {"window": 100, "patience": 3}


@pytest.mark.parametrize("offset", [3.0, 0.0, -3.0])
def test_noise_without_progress_is_a_plateau(offset):
    losses = np.concatenate([offset + 0.1 * one_noise(900), offset - 2 + 0.1 * one_noise(150)])
    found = watched("plateau", PLATEAU, loss=losses)
    assert not found[:399].any()
    assert found[890]
    assert not found[1000:].any(), "the alarm ends with the next better window"


def test_sitting_at_chance_level_is_seen_after_one_window():
    losses = np.log(2) + 0.002 * one_noise(150)
    settings = {**PLATEAU, "chance_level": 0.693147}
    losses = np.insert(losses, 50, [np.nan] * 30)
    assert np.flatnonzero(watched("plateau", settings, loss=losses)).tolist() == [*range(129, 180)]
    assert not watched("plateau", PLATEAU, loss=losses).any(), "opt-in"
    assert not watched("plateau", settings, loss=losses - 0.2).any()


@pytest.mark.parametrize("offset", [1.0, -5.0])
def test_two_wide_gaps_in_a_row_are_overfitting(offset):
    train = offset + 0.1 * one_noise(600)
    evaluations = np.full(600, np.nan)
    evaluations[[100, 200, 300, 400, 500]] = offset + np.array([2.0, 0.1, 2.0, 2.0, 0.1])
    settings = {"max_gap": 1.0, "patience": 2}
    found = watched("overfit", settings, loss=train, eval_loss=evaluations)
    assert np.flatnonzero(found).tolist() == [*range(400, 500)]


def unstable(losses: np.ndarray, norms: np.ndarray) -> np.ndarray:
    """At which steps `instability` alarms, (steps, lanes)."""
    return watched("instability", {}, loss=losses, grad_norm=norms)


def growth(steps: int, start: int, factor: float) -> np.ndarray:
    """0 before `start`, then 1, factor, factor**2, ... up to factor**20."""
    power = np.arange(steps) - start
    return np.where(power < 0, 0.0, float(factor) ** np.clip(power, 0, 20))


LOSSES = {
    "flat": lambda t: 2.0 + 0 * t,
    "falling": lambda t: 2.0 + 3 * np.exp(-t / 80),
    "near zero": lambda t: 0.01 + 0 * t,
    "negative": lambda t: -5.0 - t / 100,
}


@pytest.mark.parametrize("factor", [1.5, 4.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_growth_alarms_within_a_few_steps_of_standing_out(kind, factor):
    steps, start = 200, 120
    base = LOSSES[kind](np.arange(steps))
    spread = np.ptp(base[:start]) + abs(base[start])
    grown = growth(steps, start, factor)
    losses = (base + 0.1 * spread * grown)[:, None] + 0.01 * spread * noise(steps, 1)
    norms = (1 + 20 * grown)[:, None] * np.exp(0.2 * noise(steps, 2))
    found = unstable(losses, norms)
    assert not found[:start].any()
    assert found.any(0).all()
    # From the step on at which it is all that the unstable has improved.
    stands_out = start + np.log(10) / np.log(factor)
    assert (found.argmax(0) <= stands_out + 4).all()
    assert not unstable(losses, np.ones_like(norms)).any(), "the loss alone"
    # A power of two as the unit of the loss or of the norm changes no bit.
    np.testing.assert_array_equal(unstable(losses * 2.0**-20, norms), found)
    np.testing.assert_array_equal(unstable(losses, norms * 2.0**-20), found)


def test_data_that_are_different_at_once_never_alarm():
    """Steps of any height, any norms, noise up to 20 % of the height, learnt or not: no alarm."""
    rng = np.random.default_rng(10)
    steps = 300
    many = 400
    t = np.arange(steps)[:, None]
    at = rng.integers(250, size=many)
    kinds = np.stack([of(np.arange(steps)) for of in LOSSES.values()], axis=1)
    learnt = rng.choice([0.0, 0.01, 0.1], many)
    relative = rng.uniform(0, 0.2, many) * rng.uniform(-1, 1, (steps, many))
    high = t >= at
    height = 10.0 ** rng.uniform(-2, 4, many) * np.exp(-learnt * (t - at) * high)
    losses = kinds[:, rng.integers(len(LOSSES), size=many)] + high * height * (1 + relative)
    jump = np.where(high, 10.0 ** rng.uniform(0, 4, many), 1.0)
    norms = np.exp(0.3 * rng.normal(size=(steps, many))) * jump
    assert not np.flatnonzero(unstable(losses, norms).any(0)).tolist(), "lanes"
    # A mix of two sources.
    ratio = 10.0 ** rng.uniform(0.3, 3, many)
    share = rng.choice([0.01, 0.15, 0.5], many)
    factor = np.where(rng.random((steps, many)) < share, ratio, 1.0)
    losses, norms = (spread ** rng.normal(size=factor.shape) * factor for spread in (1.05, 1.3))
    assert not np.flatnonzero(unstable(losses, norms).any(0)).tolist(), "lanes"


@pytest.mark.parametrize(
    ("alpha", "record_rate"), [(0.02, 0.3), (0.02, 0.8), (0.1, 0.5), (0.3, 0.3), (0.3, 0.8)]
)
def test_the_exact_probability_of_an_alarm_is_at_most_alpha(alpha, record_rate):
    """Every pattern of records in 13 steps, by its probability in an exchangeable stream."""
    steps = 13
    patterns = np.array(list(itertools.product([False, True], repeat=steps - 1))).T
    patterns = np.concatenate([np.ones((1, patterns.shape[1]), bool), patterns])
    t = np.arange(1, steps + 1)[:, None]
    chance = np.where(patterns, 1 / t, 1 - 1 / t).prod(axis=0)
    assert chance.sum() == pytest.approx(1)
    settings = {"alpha": alpha, "record_rate": record_rate, "growth": 0.0}
    alarmed = watched("records", settings, loss=np.where(patterns, t, -t))
    assert 0 < chance[alarmed.any(axis=0)].sum() <= alpha
