"""Growth of loss and norm: `instability`, and `records` with a bounded probability.

A single jump does not count. Exchangeable losses raise an alarm in at most a share `alpha` of all
runs.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.core.verdict import Cause
from tests.core.engine_runner import Runner, alarms, watching

# -- loss and norm grow from step to step ---------------------------------------------------------

INSTABILITY = watching("instability")
FEW_LANES = 40


def noise(steps: int, seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(steps, FEW_LANES))


def run(losses: np.ndarray, norms: np.ndarray, *, config=INSTABILITY, **more) -> np.ndarray:
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


@pytest.mark.parametrize("factor", [1.5, 2.0, 4.0])
@pytest.mark.parametrize("kind", LOSSES)
def test_growth_alarms_within_a_few_steps_of_standing_out(kind, factor):
    steps, start = 200, 120
    base = LOSSES[kind](np.arange(steps))
    spread = np.ptp(base[:start]) + abs(base[start])
    grown = growth(steps, start, factor)
    losses = base + 0.1 * spread * grown
    losses = losses[:, None] + 0.01 * spread * noise(steps)
    norms = (1 + 20 * grown)[:, None] * np.exp(0.2 * noise(steps, 2))
    found = run(losses, norms)
    assert not found[:start].any()
    assert found.any(0).all()
    # From the step on at which it is all that the run has improved.
    stands_out = start + np.log(10) / np.log(factor)
    assert (found.argmax(0) <= stands_out + 4).all()


def test_data_that_are_different_at_once_never_alarm():
    """Steps of any height, any norms, noise up to 20 % of the height, learnt or not: no alarm."""
    rng, steps = np.random.default_rng(10), 300
    t, at = np.arange(steps)[:, None], rng.integers(250, size=MANY)
    learnt = rng.choice([0.0, 0.01, 0.1], MANY)
    relative = rng.uniform(0, 0.2, MANY) * rng.uniform(-1, 1, (steps, MANY))
    high = t >= at
    height = 10.0 ** rng.uniform(-2, 4, MANY) * np.exp(-learnt * (t - at) * high)
    losses = bases(rng, steps) + high * height * (1 + relative)
    jump = np.where(high, 10.0 ** rng.uniform(0, 4, MANY), 1.0)
    norms = np.exp(0.3 * rng.normal(size=(steps, MANY))) * jump
    assert not np.flatnonzero(run(losses, norms).any(0)).tolist(), "lanes"


def test_a_mix_of_two_sources_never_alarms():
    kinds = np.array(list(itertools.product([0.01, 0.15, 0.5], [2.0, 20.0, 1000.0])))
    rng, (share, ratio) = np.random.default_rng(11), np.repeat(kinds.T, 200, axis=1)
    factor = np.where(rng.random((400, len(share))) < share, ratio, 1.0)
    losses, norms = (spread ** rng.normal(size=factor.shape) * factor for spread in (1.05, 1.3))
    assert not run(losses, norms).any()


def test_loss_alone_or_norm_alone_is_none():
    t = 100
    grown = growth(t, 50, 1.5)
    assert run(2 + grown, 1 + 20 * grown).any()
    assert not run(2 + grown, np.ones(t)).any()
    assert not run(np.full(t, 2.0), 1 + 20 * grown).any()


def scenario(steps: int = 160) -> tuple[np.ndarray, np.ndarray]:
    grown = growth(steps, 100, 1.5, 12)[:, None]
    losses = 2 + np.exp(-np.arange(steps) / 30)[:, None] + 0.05 * noise(steps) + 0.5 * grown
    norms = (1 + 20 * grown) * np.exp(0.2 * noise(steps, 2))
    return losses.astype(np.float32), norms.astype(np.float32)


def test_a_power_of_two_as_unit_changes_nothing():
    """Scaling the loss or the norm alone changes no bit."""
    losses, norms = scenario()
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
    """Only right after a record with a large norm a step that is not finite counts."""
    losses, norms = scenario()
    clean = run(losses, norms)
    for wrong in (np.nan, np.inf, -np.inf):
        for which in (0, 1):
            places = [0, 3, 50, 50, 99, 150]
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


# -- records of the loss --------------------------------------------------------------------------

RECORDS = watching("records")
LANES = 2000


def records_of(losses: Any, config=RECORDS, **more) -> np.ndarray:
    """At which steps the detector alarms, (steps, lanes) or (steps,)."""
    losses = np.asarray(losses, np.float32)
    lanes = losses.shape[1] if losses.ndim == 2 else 0
    return alarms(Runner(config, lanes=lanes).feed(loss=losses, **more), Cause.RECORDS)


def explosion(before: int, factor: float, length: int, seed: int = 0) -> np.ndarray:
    """Losses around 2, then growth by `factor` a step."""
    noise = np.random.default_rng(seed).normal(size=before)
    return np.concatenate([2 + 0.1 * noise, 2 + factor ** np.arange(1, length + 1)])


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
    losses = np.where(patterns, t, -t)
    config = watching("records", alpha=alpha, record_rate=record_rate, growth=0.0)
    found = chance[records_of(losses, config).any(axis=0)].sum()
    assert 0 < found <= alpha


STREAMS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "Cauchy": lambda rng, shape: rng.standard_cauchy(shape),
    "two sources": lambda rng, shape: (
        np.where(rng.random(shape) < 0.15, 20.0, 1.0) + 0.1 * rng.normal(size=shape)
    ),
    "few values": lambda rng, shape: rng.integers(0, 5, shape),
    "a level of its own for each run": lambda rng, shape: (
        1e6 * rng.normal(size=shape[1]) + rng.exponential(size=shape)
    ),
    "shuffled powers": lambda rng, shape: rng.permuted(
        np.broadcast_to(1.05 ** np.arange(shape[0])[:, None], shape), axis=0
    ),
}


@pytest.mark.parametrize("stream", STREAMS)
def test_exchangeable_streams_alarm_in_at_most_a_share_alpha_of_all_runs(stream):
    losses = STREAMS[stream](np.random.default_rng(7), (400, LANES))
    for alpha in (0.01, 0.1):
        share = records_of(losses, watching("records", alpha=alpha, growth=0.0)).any(axis=0).mean()
        assert share <= alpha + 3 * math.sqrt(alpha / LANES)
    assert not records_of(losses).any(), "with the default margin"


FALLS = {
    "line": lambda t: -t / 50,
    "steps": lambda t: -(t // 70),
    "decay": lambda t: 8 * np.exp(-t / 60),
}


@pytest.mark.parametrize("fall", FALLS)
def test_a_falling_loss_alarms_no_sooner(fall):
    """Run by run: subtracting a falling curve adds records, and never removes one."""
    config = watching("records", alpha=0.3, growth=0.0)
    noise = np.random.default_rng(8).normal(size=(300, LANES))
    steps = np.arange(300)[:, None]
    flat = np.logical_or.accumulate(records_of(noise, config), axis=0)
    falling = np.logical_or.accumulate(records_of(noise + FALLS[fall](steps), config), axis=0)
    assert flat[-1].any()
    assert not (falling & ~flat).any()


@given(
    st.lists(st.one_of(st.integers(-30, 30), st.just(None)), min_size=1, max_size=60),
    st.integers(-8, 8),
    st.integers(-100, 100),
)
def test_the_unit_and_the_zero_of_the_loss_do_not_matter(losses, power, shift):
    config = watching("records", alpha=0.25)
    plain = [math.nan if each is None else float(each) for each in losses]
    other = [2.0**power * (each + shift) for each in plain]
    assert records_of(plain, config).tolist() == records_of(other, config).tolist()


def test_overflow_after_a_record_counts_as_a_record():
    quiet = explosion(1000, 1.0, 0)
    found = np.flatnonzero(records_of([*quiet, 4.0, 8.0, math.inf, math.nan]))
    assert found.tolist() == [1003]


def test_the_history_restarts_where_a_change_is_expected():
    losses = np.concatenate([explosion(300, 1.6, 3), 100 + explosion(300, 1.6, 3)])
    restart = np.arange(len(losses)) == 303
    runner = Runner(RECORDS)
    runner.feed(loss=losses[:304], change_expected=restart[:304])
    (state,) = runner.state.detectors
    assert (state.count, state.score, state.history.highest) == (1, 0.0, np.float32(losses[303]))
    assert not records_of(losses, change_expected=restart).any()
