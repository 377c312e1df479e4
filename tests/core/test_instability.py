"""Instability: loss and norm that grow from step to step; a single jump does not count."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from healcore.core.verdict import Cause
from tests.core.engine_runner import Runner, alarms, watching

CONFIG = watching("instability")
LANES = 40


def noise(steps: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, LANES))


def run(losses: np.ndarray, norms: np.ndarray, *, config=CONFIG, **more) -> np.ndarray:
    """At which steps it alarms, (steps, lanes)."""
    losses, norms = np.broadcast_arrays(losses, norms)
    lanes = losses.shape[1] if losses.ndim == 2 else 0
    signals = {"loss": losses.astype(np.float32), "grad_norm": norms.astype(np.float32), **more}
    return alarms(Runner(config, lanes=lanes).feed(**signals), Cause.INSTABILITY)


def growth(steps: int, start: int, factor: float, length: int = 1 << 20) -> np.ndarray:
    """0 before `start`, then 1, factor, factor**2, ..., and what it was at its end from there."""
    power = np.clip(np.arange(steps) - start, -1, length - 1)
    return np.where(power < 0, 0.0, float(factor) ** np.clip(power, 0, 60))


MANY = 400
"""Lanes of a property: each a run of its own kind."""

LOSSES = {
    "flat": lambda t: 2.0 + 0 * t,
    "falling": lambda t: 2.0 + 3 * np.exp(-t / 80),
    "near zero": lambda t: 0.01 + 0 * t,
    "negative": lambda t: -5.0 - t / 100,
}


def bases(rng: np.random.Generator, steps: int) -> np.ndarray:
    """Losses of all kinds, (steps, MANY)."""
    kinds = np.stack([of(np.arange(steps)) for of in LOSSES.values()], axis=1)
    return kinds[:, rng.integers(len(LOSSES), size=MANY)]


# -- what it is for -------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", [1.3, 1.6, 2.0, 4.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_growth_alarms_within_a_few_steps_of_standing_out(kind, factor):
    steps, start = 200, 120
    base = LOSSES[kind](np.arange(steps))
    spread = np.ptp(base[:start]) + abs(base[start])
    grown = growth(steps, start, factor)
    losses = base + 0.1 * spread * grown
    losses = losses[:, None] + 0.01 * spread * noise(steps)
    before = growth(steps, start - 4, factor)  # the norms of a model that breaks rise first
    norms = (1 + 5 * before)[:, None] * np.exp(0.2 * noise(steps, 2))
    found = run(losses, norms)
    assert not found[:start].any()
    first = found.argmax(0)
    assert found.any(0).all()
    # From the step on at which it is twice all that the run has improved, two more records, each
    # of two steps.
    stands_out = start + np.log(20) / np.log(factor)
    assert (first <= stands_out + 2 * np.log(1.4) / np.log(factor) + 4).all()


def test_a_rate_that_is_too_high_from_the_first_step_on():
    losses, norms = 2.3 * 1.5 ** np.arange(20), 3.0 ** np.arange(20)
    assert run(losses, norms)[:12].any()


# The first steps of healbench's negative_loss (seed 3, a fixed clip): it comes back by itself.
SWING = np.array([
    0.081, -0.035, -0.136, -0.294, -0.412, -0.675, -0.857, -0.831, -0.699, -0.648, 1.941, 5.026,
    1.731, 4.276, 5.264, 4.682, 4.124, 6.354, 2.054, -1.007,
])  # fmt: skip
SWING_NORMS = np.array([
    0.749, 0.807, 0.964, 1.092, 1.304, 1.361, 1.493, 3.409, 9.635, 29.03, 174.9, 323.2,
    76.56, 238.8, 299.5, 272.1, 227.5, 454.9, 141.2, 18.12,
])  # fmt: skip


def test_the_first_16_steps_need_one_more_record():
    assert not run(SWING, SWING_NORMS).any()
    late = run(np.append(np.full(30, 0.1), SWING), np.append(np.full(30, 0.7), SWING_NORMS))
    assert late.any(), "the same three records later in a run"
    grown = growth(16, 6, 2.0)
    assert run(2 + 10 * grown, 1 + 50 * grown).any(), "what goes on growing is still found"


def test_an_explosion_that_overflows_after_three_steps_is_found():
    """Plain SGD at 40 times a good rate in Trainer: the next gradient norm is infinite."""
    losses = np.array([3.47, 3.47, 3.31, 2.79, 2.71, 5.24, 15.27, 287.4, 33557.0])
    norms = np.array([0.7, 0.8, 0.8, 1.2, 2.5, 2.9, 21.7, 193.8, 11646.0])
    assert run(losses, norms).any()


def test_each_further_alarm_needs_two_more_records():
    found = run(2 + growth(60, 30, 1.45), 1 + 20 * growth(60, 30, 1.45))
    where = np.flatnonzero(found)
    assert len(where) > 3
    assert np.diff(where).min() == 2


def test_after_an_alarm_only_what_is_higher_than_before_counts():
    """A loss that is many times as noisy at a new level sets records there again and again."""
    rng, steps, start = np.random.default_rng(16), 260, 100
    high = (np.arange(steps) >= start)[:, None]
    grown = growth(steps, start, 2.0, 6)[:, None]  # then noise of 0.3 to 1 times the height
    rough = np.where(np.arange(steps)[:, None] < start + 6, 1.0, rng.uniform(0.3, 1, (steps, MANY)))
    losses = 2.0 + 0.01 * rng.normal(size=(steps, MANY)) + 10 * grown * rough * high
    norms = 1 + 300 * growth(steps, start - 3, 2.0, 9)[:, None] * np.ones(MANY)
    found = run(losses, norms)
    assert found[: start + 8].any(0).all()
    assert not found[start + 8 :].any()
    further = 640 * growth(steps, 140, 2.0)[:, None]
    found = run(losses + further, norms + further)
    assert found[140:150].any(0).all(), "what grows beyond it does"


def test_steep_growth_counts_twice():
    """Three records of which one is the square of growth: one step earlier than three."""
    slow = run(2 + 2 * growth(60, 30, 1.5), 1 + 20 * growth(60, 28, 1.5))
    steep = run(2 + 2 * growth(60, 30, 2.1), 1 + 20 * growth(60, 28, 2.1))
    assert steep.argmax() == slow.argmax() - 1


# -- what it is not for ---------------------------------------------------------------------------


@pytest.mark.parametrize(("power", "length"), [(1, 5), (1, 30), (1, 100), (2, 5), (2, 30)])
def test_a_term_of_the_loss_whose_weight_is_raised_is_no_instability(power, length):
    """Loss and norm grow with the weight, from one step to the next; no norm has risen before."""
    steps, at = 300, 80
    weight = np.clip((np.arange(steps) - at + 1) / length, 0, 1) ** power
    losses = (0.5 + 300 * weight)[:, None] * np.exp(0.1 * noise(steps))
    norms = (1 + 200 * weight)[:, None] * np.exp(0.2 * noise(steps, 2))
    assert not run(losses, norms).any()


@pytest.mark.parametrize(("rises", "found"), [(1.0, False), (5.0, True)])
def test_the_norms_of_a_model_that_breaks_rise_before_its_loss(rises, found):
    """The same ramp of the loss, with and without a larger norm two steps before it."""
    grown = np.clip(np.arange(120) - 79, 0, 30)
    norms = 1 + 20.0 * grown
    norms[77] = rises
    assert run(0.5 + 10 * grown, norms).any() == found


def test_a_growth_out_of_the_blue_is_found_if_it_is_faster_than_a_ramp():
    """One step of a far too high rate: norms were ordinary before it."""
    grown = growth(120, 80, 4.0, 12)
    assert run(2 + 5 * grown, 1 + 30 * grown)[:90].any()


def test_data_that_are_different_at_once_never_alarm():
    """Steps of any height, any norms, noise up to 30 % of the height, learnt or not: no alarm."""
    rng, steps = np.random.default_rng(10), 300
    t, at = np.arange(steps)[:, None], rng.integers(250, size=MANY)
    learnt = rng.choice([0.0, 0.01, 0.1], MANY)
    relative = rng.uniform(0, 0.3, MANY) * rng.uniform(-1, 1, (steps, MANY))
    high = t >= at
    height = 10.0 ** rng.uniform(-2, 4, MANY) * np.exp(-learnt * (t - at) * high)
    losses = bases(rng, steps) + high * height * (1 + relative)
    jump = np.where(high, 10.0 ** rng.uniform(0, 4, MANY), 1.0)
    norms = np.exp(0.3 * rng.normal(size=(steps, MANY))) * jump
    assert not np.flatnonzero(run(losses, norms).any(0)).tolist(), "lanes"


@pytest.mark.parametrize(("norm", "found"), [(10.0, False), (30.0, True)])
def test_after_a_jump_more_growth_needs_twice_the_norms(norm, found):
    """A loss that has jumped after its norms: on the way down it grows by half, again and again."""
    rng, steps, start = np.random.default_rng(15), 100, 40
    since = np.arange(steps)[:, None] - start
    down = np.where(since < 0, 0.0, 60 * np.exp(-np.clip(since, 0, 20) / 4))
    again = 2 * np.where(since < 20, 0.0, 1.5 ** ((since - 20) % 8))
    losses = 2.0 + 0.01 * rng.normal(size=(steps, LANES)) + down + again
    norms = np.where(since < -2, 1.0, norm) * np.exp(0.05 * rng.normal(size=(steps, LANES)))
    assert run(losses, norms).any(0).all() == found
    assert run(losses, norms).any() == found


def test_single_outliers_never_alarm():
    """Single bad steps never alarm, however large or many, if no two are in a row."""
    rng, steps = np.random.default_rng(11), 300
    wild = rng.random((steps, MANY)) < rng.uniform(0, 1, MANY)
    for i in range(1, steps):
        wild[i] &= ~wild[i - 1]
    size = rng.uniform(0, 8, MANY)
    factor = np.where(wild, 10.0 ** (size * rng.uniform(0, 1, (steps, MANY))), 0.0)
    losses = bases(rng, steps) + 0.01 * rng.normal(size=(steps, MANY)) + factor
    assert not np.flatnonzero(run(losses, 1 + 100 * factor).any(0)).tolist(), "lanes"


def test_no_alarm_while_the_loss_comes_back():
    """From the second falling step on there is no alarm, whatever came before."""
    rng, steps, top = np.random.default_rng(12), 200, 100
    losses = 2 + 0.05 * rng.normal(size=(steps, MANY))
    norms = np.exp(0.3 * rng.normal(size=(steps, MANY)))
    starts, factors = rng.integers(5, top, MANY), rng.uniform(1.05, 2.5, MANY)
    grown = np.stack(
        [growth(steps, at, by, top - at) for at, by in zip(starts, factors, strict=True)], axis=1
    )
    rough = rng.uniform(0, 1, MANY) * rng.normal(size=(top, MANY))
    losses[:top] += grown[:top] * np.exp(rough)
    norms += 30 * grown
    pace = rng.uniform(0.001, 0.5, MANY)
    after = np.exp(-pace * np.cumsum(rng.exponential(size=(steps - top, MANY)), axis=0))
    losses[top:] = losses[top - 1] * after
    found = run(losses, norms)
    assert found[:top].any(0).mean() > 0.2, "many had alarmed before"
    assert not np.flatnonzero(found[top + 1 :].any(0)).tolist(), "lanes"


def test_loss_alone_or_norm_alone_is_none():
    t = 100
    grown = growth(t, 50, 1.5)
    assert run(2 + grown, 1 + 20 * grown).any()
    assert not run(2 + grown, np.ones(t)).any()
    assert not run(np.full(t, 2.0), 1 + 20 * grown).any()


def test_without_a_norm_it_is_inactive():
    grown = growth(100, 50, 1.5).astype(np.float32)
    decisions = Runner(CONFIG).feed(loss=2 + grown)
    assert not any(d.cause for d in decisions)
    assert not any(d.cause for d in Runner(CONFIG).feed(grad_norm=1 + 20 * grown))


@pytest.mark.parametrize("zeros", [1, 3, 30])
def test_a_run_that_begins_with_norms_of_zero_has_a_usual_norm_afterwards(zeros):
    """Otherwise every norm would be many times the usual one, and a loss alone would alarm."""
    norms = np.where(np.arange(100) < zeros, 0.0, 1.0)
    assert not run(2 + growth(100, 60, 1.5), norms).any()


@pytest.mark.parametrize("value", [0.0, 1.0, -1.0])
def test_a_constant_loss(value):
    losses = np.full(300, value)
    losses[150:] *= 1.0001
    assert not run(losses, np.geomspace(1, 1e6, 300)).any()


def test_noise():
    kinds = list(itertools.product([2.0, 0.0, -3.0], [1e-4, 0.1, 1.0]))
    losses = np.concatenate([offset + spread * noise(2000) for offset, spread in kinds], axis=1)
    found = run(losses, np.tile(np.exp(noise(2000, 2)), len(kinds)))
    wrong = [
        kind for kind, of in zip(kinds, np.split(found, len(kinds), 1), strict=True) if of.any()
    ]
    assert not wrong, "offset, spread"


def test_growth_that_comes_back_in_between_is_no_growth():
    """Spikes of two steps, each higher than the last."""
    losses, norms = np.full(200, 2.0), np.ones(200)
    for k, at in enumerate(range(50, 130, 8)):
        losses[at : at + 2] += 2 * 1.5**k
        norms[at : at + 2] *= 30 * 1.5**k
    assert not run(losses, norms).any()


def test_growth_slower_than_its_patience_is_no_growth():
    """A staircase whose steps are further apart than `patience`."""
    stairs = 2 * 1.5 ** np.clip((np.arange(300) - 80) // 40, 0, 5) * (np.arange(300) >= 80)
    assert not run(2 + stairs, 1 + 20 * np.roll(stairs, -2)).any()
    quick = 2 * 1.5 ** np.clip((np.arange(300) - 80) // 10, 0, 5) * (np.arange(300) >= 80)
    assert run(2 + quick, 1 + 20 * np.roll(quick, -2)).any()


def test_an_unfinished_growth_is_forgotten_where_the_loss_stays_between():
    """Two records, then below what stands out but not back; the third is much later."""
    losses, norms = np.full(400, 2.0), np.ones(400)
    losses[100:105] += [2.2, 2.2, 3.2, 3.2, 3.2]
    losses[105:300] += 0.9
    losses[300:303] += 5.0
    norms[100:303] = 100.0
    norms[105:298] = 1.0
    assert not run(losses, norms).any()


# -- what may not change it -----------------------------------------------------------------------


def scenario(steps: int = 160) -> tuple[np.ndarray, np.ndarray]:
    grown = growth(steps, 100, 1.5, 12)[:, None]
    losses = 2 + np.exp(-np.arange(steps) / 30)[:, None] + 0.05 * noise(steps) + 0.5 * grown
    before = growth(steps, 96, 1.5, 16)[:, None]
    return losses.astype(np.float32), ((1 + 10 * before) * np.exp(0.2 * noise(steps, 2)))


def test_a_power_of_two_as_unit_changes_nothing():
    """Scaling the loss or the norm alone changes no bit."""
    losses, norms = scenario()
    norms = norms.astype(np.float32)
    found = run(losses, norms)
    assert found.any(0).all()
    units = [2.0 ** np.float32(power) for power in (-20, -7, -1, 0, 3, 20)]
    kinds = list(itertools.product(units, units))
    scaled = run(
        np.concatenate([losses * unit for unit, _ in kinds], axis=1),
        np.concatenate([norms * unit for _, unit in kinds], axis=1),
    )
    np.testing.assert_array_equal(np.tile(found, len(kinds)), scaled)


def test_nan_and_inf_teach_nothing():
    losses, norms = scenario()
    clean = run(losses, norms)
    for wrong in (np.nan, np.inf, -np.inf):
        for which in (0, 1):
            places = [0, 3, 50, 101, 103, 103, 130]
            parts = [np.insert(part, places, 1.0, axis=0) for part in (losses, norms)]
            bad = np.insert(np.zeros(len(losses), bool), places, True)
            parts[which][bad] = wrong
            found = run(*parts)
            np.testing.assert_array_equal(found[~bad], clean)
            assert not found[bad].any()


@pytest.mark.parametrize("at", [0, 1, 30, 99, 100, 103, 108, 113, 159])
def test_an_announced_change_starts_over(at):
    """From there on it decides as on a run that begins there."""
    losses, norms = scenario()
    change_expected = np.arange(160) == at
    flags = np.broadcast_to(change_expected[:, None], losses.shape)
    found = run(losses, norms, change_expected=flags)
    np.testing.assert_array_equal(found[:at], run(losses, norms)[:at])
    np.testing.assert_array_equal(found[at:], run(losses[at:], norms[at:]))


def test_a_change_announced_at_a_nan_step_starts_over_too():
    losses, norms = scenario()
    losses[104] = np.nan
    change_expected = np.broadcast_to((np.arange(160) == 104)[:, None], losses.shape)
    found = run(losses, norms, change_expected=change_expected)
    np.testing.assert_array_equal(found[105:], run(losses[105:], norms[105:]))


def test_there_is_none_in_warm_up():
    grown = growth(40, 2, 1.5)
    late = watching("instability", warmup_steps=20)
    assert run(1 + grown, 1 + 20 * grown)[:20].any()
    assert not run(1 + grown, 1 + 20 * grown, config=late)[:22].any()


# -- after a shift --------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [1.0, 4.0, 100.0])
def test_a_level_that_stays_is_the_level_and_growth_from_there_is_seen(jump):
    steps, at, start = 600, 150, 400
    losses = np.full(steps, 2.0) + (np.arange(steps) >= at) * 6.0
    norms = np.where(np.arange(steps) >= at, jump, 1.0)
    grown = growth(steps, start, 1.5)
    losses = (losses + 0.5 * grown)[:, None] + 0.05 * noise(steps)
    norms = (norms * (1 + 5 * grown))[:, None] * np.exp(0.1 * noise(steps, 2))
    found = run(losses, norms)
    assert not found[:start].any()
    assert found[start : start + 20].any(0).all()


@pytest.mark.parametrize(("raised", "expected"), [(10.0, True), (1.05, True), (1.0, False)])
def test_without_larger_norms_before_it_a_raised_learning_rate_is_the_cause(raised, expected):
    """Clipped steps move the weights by the same length each: the loss grows as a square."""
    t = np.arange(160)
    grown = np.where(t >= 120, (t - 119.0) ** 2, 0.0)
    rates = np.where(t >= 119, raised, 1.0) * 1e-3
    losses = 2 + 0.05 * noise(160) + grown[:, None]
    norms = (1 + 10 * grown)[:, None] * np.exp(0.1 * noise(160, 2))
    found = run(losses, norms, learning_rate=np.repeat(rates[:, None], LANES, 1).astype("f"))
    assert found[120:130].any(0).all() == expected
    assert found.any() == expected


def test_a_warm_up_raises_the_rate_at_each_step():
    t = np.arange(160)
    grown = np.where(t >= 120, (t - 119.0) ** 2, 0.0)
    losses, norms = 2 + 0.05 * noise(160)[:, 0] + grown, 1 + 10 * grown
    assert run(losses, norms, learning_rate=(1e-5 * (t + 1)).astype("f")).any()
    assert not run(losses, norms, learning_rate=(1e-5 * (161 - t)).astype("f")).any()
