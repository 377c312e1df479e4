"""Records: exchangeable losses raise an alarm in at most a share `alpha` of all runs."""

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

CONFIG = watching("records")
LANES = 2000


def run(losses: Any, config=CONFIG, **more) -> np.ndarray:
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
    found = chance[run(losses, config).any(axis=0)].sum()
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
        share = run(losses, watching("records", alpha=alpha, growth=0.0)).any(axis=0).mean()
        assert share <= alpha + 3 * math.sqrt(alpha / LANES)
    assert not run(losses).any(), "with the default margin"


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
    flat = np.logical_or.accumulate(run(noise, config), axis=0)
    falling = np.logical_or.accumulate(run(noise + FALLS[fall](steps), config), axis=0)
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
    assert run(plain, config).tolist() == run(other, config).tolist()


def test_overflow_after_a_record_counts_as_a_record():
    quiet = explosion(1000, 1.0, 0)
    found = np.flatnonzero(run([*quiet, 4.0, 8.0, math.inf, math.nan]))
    assert found.tolist() == [1003]


def test_the_history_restarts_where_a_change_is_expected():
    losses = np.concatenate([explosion(300, 1.6, 3), 100 + explosion(300, 1.6, 3)])
    restart = np.arange(len(losses)) == 303
    runner = Runner(CONFIG)
    runner.feed(loss=losses[:304], change_expected=restart[:304])
    (state,) = runner.state.detectors
    assert (state.count, state.score, state.history.highest) == (1, 0.0, np.float32(losses[303]))
    assert not run(losses, change_expected=restart).any()
