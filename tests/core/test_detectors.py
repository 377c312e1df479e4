"""What the detectors promise: spikes, noise, constants, NaN, new levels; and slow faults.

Many runs are the lanes of one: a detector never sees another lane.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from tests.core.engine_runner import Runner, alarms, ordered, sustained, watching

LANES = 60
SPIKES: dict[str, tuple[str, Cause]] = {
    "loss_spike": ("loss", Cause.LOSS_SPIKE),
    "grad_spike": ("grad_norm", Cause.GRAD_SPIKE),
    "update_spike": ("update_norm", Cause.UPDATE_SPIKE),
    "loss_window": ("loss", Cause.LOSS_SPIKE),
    "grad_window": ("grad_norm", Cause.GRAD_SPIKE),
    "grad_ema": ("grad_norm", Cause.GRAD_SPIKE),
    "grad_ceiling": ("grad_norm", Cause.GRAD_SPIKE),
}
"""Name -> its signal and its cause."""
OUTLIERS = ("loss_window", "grad_window", "grad_ema", "grad_ceiling")
BOUNDS = {
    "grad_spike": 80,
    "update_spike": 80,
    "grad_window": 40,
    "grad_ema": 25,
    "grad_ceiling": 100,
}
"""Steps of a lasting rise of x30 until it is accepted; of the windows 30 to 33 were measured."""


def noise(steps: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def run(name: str, values: np.ndarray, *, norms=None, **settings) -> tuple[np.ndarray, np.ndarray]:
    """(alarms, rollbacks ordered), each (steps, lanes), on values of the detector's signal."""
    signal, cause = SPIKES[name] if name in SPIKES else ("loss", Cause[name.upper()])
    values = np.asarray(values, np.float32)
    runner = Runner(watching(name, sustained(cause), **settings), lanes=values.shape[1])
    # The update spike has no use for a loss, but a step needs a loss or a gradient norm.
    signals = {"loss": np.ones_like(values), signal: values}
    if norms is not None:
        signals["grad_norm"] = np.broadcast_to(norms, values.shape)
    decisions = runner.feed(**signals)
    return alarms(decisions, cause), ordered(decisions, Action.ROLLBACK)


# -- spikes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in SPIKES if name != "loss_spike"])
def test_a_spike_is_one_alarm_at_any_scale(name):
    values = np.exp(0.1 * noise(300))
    values[200] = 40
    found, lasting = run(name, np.concatenate([values * unit for unit in (1e-6, 1, 1e6)], axis=1))
    assert found[200].all()
    assert not np.delete(found, 200, axis=0).any()
    assert not lasting.any()


@pytest.mark.parametrize("name", OUTLIERS)
def test_the_fifth_of_a_row_is_sustained(name):
    values = np.exp(0.1 * noise(300))
    values[150], values[200:210] = 40, 40 * 2.0 ** np.arange(10)[:, None]
    _, lasting = run(name, values)
    assert lasting[204].all()
    assert not np.delete(lasting, 204, axis=0).any()


@pytest.mark.parametrize("name", BOUNDS)
def test_a_lasting_level_is_accepted_within_the_bound(name):
    values = np.exp(0.1 * noise(700))
    values[300:] *= 30
    found, lasting = run(name, values)
    assert not found[:300].any()
    assert found[300].all()
    assert not found[300 + BOUNDS[name] :].any()
    assert lasting[300:310].any(0).all()


@pytest.mark.parametrize("name", ["grad_spike", "update_spike"])
def test_noise_and_small_shifts_of_norms_are_none(name):
    # Spread of lognormal norms, and how many steps of a thousand may pass for spikes.
    spreads = {0.0: 0, 1e-4: 0, 0.1: 0, 0.3: 0.2, 0.5: 3}
    values = np.concatenate([np.exp(spread * noise(1000)) for spread in spreads], axis=1)
    values[500:] *= 1.5
    found, lasting = run(name, values)
    by_spread = np.split(found, len(spreads), axis=1)
    for (spread, per_mille), each in zip(spreads.items(), by_spread, strict=True):
        assert 1000 * each.mean() <= per_mille, spread
    assert not lasting.any()


@pytest.mark.parametrize("name", OUTLIERS)
def test_zeros_are_no_unit_and_constants_have_one_percent_free(name):
    values = np.zeros((400, 1))
    values[200:] = 1.0
    values[300] = 1.0005
    found, _ = run(name, values)
    assert not found[200]
    assert not found[300:].any()


def test_an_absolute_ceiling_needs_no_history():
    values = np.c_[[200.0, 50.0, 100.0, 101.0]]
    found, _ = run("grad_ceiling", values, ceiling=100.0, first_ratio=None)
    assert found[:, 0].tolist() == [True, False, False, True]


# -- spikes of the loss, in every unit ------------------------------------------------------------

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
    """(unit, alarms, rollbacks ordered) for each unit."""
    found = run(
        "loss_spike", np.concatenate([o + unit * shape for o, unit in UNITS.values()], axis=1)
    )
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


def test_a_falling_loss_is_no_spike():
    t = np.arange(2000)[:, None]
    single, lasting = run("loss_spike", 2 + 9 * np.exp(-t / 300) + 0.05 * noise(2000))
    assert single.mean() < 2e-3
    assert not lasting.any()


# -- divergence: a trend that leaves the best level and does not come back ------------------------


def diverges(losses: np.ndarray) -> np.ndarray:
    return run("divergence", losses)[0]


def test_a_noisy_ramp_from_2_to_22_is_found():
    """A published rule waits for fifty rises in a row and never finds it."""
    losses = np.concatenate([2 + spread * noise(1300) for spread in (0.05, 0.5, 1.0)], axis=1)
    losses[300:] += np.linspace(0, 20, 1000)[:, None]
    found = diverges(losses)
    assert not found[:300].any()
    assert found[300:1000].any(0).all()


def test_noise_proportional_to_the_level_hides_no_rise():
    """The noise rises with the loss: measured in the noise of now, no such rise is high."""
    rises = [(3.0, 0.05), (3.0, 0.15), (10.0, 0.3), (30.0, 0.3)]
    levels = [np.r_[np.full(400, 2.0), 2.0 * np.geomspace(1, times, 600)] for times, _ in rises]
    losses = [
        level[:, None] * np.exp(share * noise(1000))
        for level, (_, share) in zip(levels, rises, strict=True)
    ]
    found = diverges(np.concatenate(losses, axis=1))
    assert not found[:400].any()
    assert found[400:].any(0).all()


def test_noise_proportional_to_the_level_does_not_diverge():
    shares = [0.05, 0.15, 0.3, 0.5]
    levels = np.linspace(8.0, 1.0, 3000)[:, None], np.full((3000, 1), 2.0)
    losses = [level * np.exp(share * noise(3000)) for share in shares for level in levels]
    assert not diverges(np.concatenate(losses, axis=1)).any()


def test_a_spike_that_heals_is_no_divergence():
    losses = 2.5 + 0.05 * noise(1000)
    losses[500:530] += 5 * np.exp(-np.arange(30) / 8)[:, None]
    assert not diverges(losses).any()


# -- all of them ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["divergence", "instability"])
def test_noise_is_no_trend(name):
    kinds = list(itertools.product([2.0, 0.0, -3.0], [1e-4, 0.1, 1.0]))
    losses = np.concatenate([offset + unit * noise(2000) for offset, unit in kinds], axis=1)
    found, _ = run(name, losses, norms=np.tile(np.exp(noise(2000, 2)), len(kinds)))
    assert not found.any()


@pytest.mark.parametrize("name", ["loss_spike", "divergence", "instability"])
def test_constant_losses(name):
    """Then a hundredth of a percent more, which is a single alarm at most."""
    losses = np.tile([0.0, 0.6931472, 1.0, 3.0, -1.0, -2.0, 1e-8], (600, 1))
    losses[400:] *= 1.0001
    found, lasting = run(name, losses, norms=np.geomspace(1, 1e6, 600)[:, None])
    assert not found[: 400 if name == "loss_spike" else None].any()
    assert not lasting.any()


WRONG = {
    "loss_spike": (np.nan, np.inf, -np.inf),
    "grad_spike": (0.0, np.nan, np.inf),
    "update_spike": (0.0, np.nan, np.inf),
    "loss_window": (np.nan, np.inf),
    "grad_window": (np.nan, np.inf),
    "grad_ema": (np.nan, np.inf),
    "divergence": (np.nan, np.inf),
}


@pytest.mark.parametrize("name", WRONG)
def test_zeros_of_norms_and_what_is_no_number_teach_nothing(name):
    values = np.exp(0.1 * noise(500))
    values[200] = 40
    if name == "divergence":
        values[250:] += np.linspace(0, 20, 250)[:, None]
    clean = run(name, values)
    assert clean[0].any(0).all()
    # At every second step while divergence rises: the alarm is neither raised nor ended.
    places = range(1, 500) if name == "divergence" else [3, 5, 50, 50, 150, 250]
    inserted = np.insert(np.zeros(500, bool), places, True)
    for wrong in WRONG[name]:
        found = run(name, np.insert(values, places, wrong, axis=0))
        for a, b in zip(clean, found, strict=True):
            np.testing.assert_array_equal(b[~inserted], a)
            assert not b[inserted].any()


# -- faults that show only over time --------------------------------------------------------------


def one_noise(steps: int, seed: int = 2) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=steps)


class TestVanishing:
    CONFIG = watching("vanishing", threshold=1e-6, patience=20)

    def run(self, norms) -> np.ndarray:
        return alarms(Runner(self.CONFIG).feed(grad_norm=norms), Cause.GRAD_VANISHING)

    def test_after_patience_steps_in_a_row(self):
        found = self.run([1.0] * 50 + [1e-9] * 30 + [1.0] * 5)
        assert np.flatnonzero(found).tolist() == list(range(69, 80))

    def test_nan_steps_do_not_count_and_do_not_reset(self):
        found = self.run([1e-9] * 10 + [np.nan] * 30 + [1e-9] * 10)
        assert np.flatnonzero(found).tolist() == [49]


class TestPlateau:
    def run(self, losses, **settings) -> np.ndarray:
        settings = {"window": 100, "patience": 3, **settings}
        return alarms(Runner(watching("plateau", **settings)).feed(loss=losses), Cause.PLATEAU)

    @pytest.mark.parametrize("offset", [3.0, 0.0, -3.0])
    def test_noise_without_progress_is_a_plateau(self, offset):
        found = self.run(offset + 0.1 * one_noise(1500))
        assert not found[:399].any()
        assert found[-1]

    @pytest.mark.parametrize("unit", [1e-3, 1.0, 1e3])
    def test_progress_is_none_in_any_unit(self, unit):
        t = np.arange(3000)
        assert not self.run(unit * (5 - t / 1000 + 0.1 * one_noise(3000))).any()

    def test_the_alarm_ends_with_the_next_better_window(self):
        losses = np.concatenate([3 + 0.1 * one_noise(900), 1 + 0.1 * one_noise(150)])
        found = self.run(losses)
        assert found[890]
        assert not found[1000:].any()

    def test_sitting_at_chance_level_is_seen_after_one_window(self):
        losses = np.log(2) + 0.002 * one_noise(150)
        assert self.run(losses, chance_level=0.693147)[99:].all()
        assert not self.run(losses).any(), "opt-in"
        assert not self.run(losses - 0.2, chance_level=0.693147).any()

    def test_nan_does_not_enter_a_window(self):
        losses = np.log(2) + 0.002 * one_noise(150)
        found = self.run(np.insert(losses, 50, [np.nan] * 30), chance_level=0.693147)
        assert np.flatnonzero(found)[0] == 129


class TestOverfit:
    def run(self, train, evaluations: dict[int, float], **settings) -> np.ndarray:
        settings = {"max_gap": 1.0, "patience": 2, **settings}
        column = np.full(len(train), np.nan)
        column[list(evaluations)] = list(evaluations.values())
        runner = Runner(watching("overfit", **settings))
        return alarms(runner.feed(loss=train, eval_loss=column), Cause.OVERFIT)

    def test_two_wide_gaps_in_a_row(self):
        found = self.run(1 + 0.1 * one_noise(400), {100: 1.2, 200: 3.0, 300: 3.0})
        assert np.flatnonzero(found)[0] == 300

    def test_it_ends_with_a_good_evaluation(self):
        found = self.run(1 + 0.1 * one_noise(400), {100: 3.0, 200: 3.0, 300: 1.1})
        assert found[250]
        assert not found[300:].any()

    def test_negative_losses(self):
        assert self.run(-5 + 0.1 * one_noise(400), {100: -3.0, 200: -3.0})[200]
        assert not self.run(-5 + 0.1 * one_noise(400), {100: -4.9, 200: -4.9}).any()
