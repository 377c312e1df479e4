"""The clip of `default`: monotone in every backend, follows shifts, and nothing locks in."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from healcore.core.clipping import RULES
from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals
from healcore.policy import load
from tests.core.engine_runner import Runner
from tests.core.random_policies import BOUNDED
from tests.parity import backends

RULE = RULES["recent_max"]()
HELD = 1.0001 * float(RULE.ratio)
"""A spike after norms of 1 is at most this large."""
HISTORY, LANES = 24, 8

sizes = st.floats(-12.0, 14.0).map(lambda power: float(np.float32(10.0**power)))
norms = sizes | st.sampled_from([0.0, float("nan"), float("inf"), 1.0])


def passed(*parts: list[float]) -> np.ndarray:
    """What is left of each norm."""
    values = np.concatenate(parts)
    runner = Runner(EngineConfig(clip=("recent_max", RULE)))
    return np.array([v * float(runner.step(grad_norm=v).grad_scale) for v in values])


@functools.cache
def engine_on(backend: str) -> tuple[Engine, backends.Run]:
    """The clip of the preset alone."""
    engine = Engine(EngineConfig(clip=load("default").config().clip))
    return engine, backends.runner(backend, engine)


@pytest.mark.parametrize("backend", ["numpy", "jax", "torch"])
@given(
    history=st.lists(norms, min_size=HISTORY, max_size=HISTORY),
    last=st.lists(sizes, min_size=LANES, max_size=LANES),
)
@example(
    history=[1.0] * HISTORY,
    last=[1.0, 2.0, 0.999 * HELD, HELD, 1.001 * HELD, 100.0, 1e3, 1e12],
)
@settings(**BOUNDED, max_examples=60)
def test_a_larger_norm_never_passes_less(backend, history, last):
    engine, run = engine_on(backend)
    rows = np.repeat(np.array(history, np.float32)[:, None], LANES, axis=1)
    rows = np.concatenate([rows, np.sort(np.array(last, np.float32))[None]])
    state = backends.start(backend, engine.init(batch=(LANES,)))
    _, _, decisions = run(state, Signals(grad_norm=rows))
    left = rows[-1].astype(np.float64) * decisions.grad_scale[-1]
    # Factor and product are rounded to float32, and the divisor has torch's 1e-6.
    rounding = 1e-6 * (left[:-1] + decisions.grad_scale[-1][:-1])
    assert (np.diff(left) >= -rounding).all()
    assert (decisions.grad_scale[-1] <= 1).all()


def test_the_planted_error_is_no_monotone_rule():
    """The published ZClip brings the larger of two spikes further down."""
    zclip = RULES["zclip"](max_norm=None)
    left = []
    for spike in (2.0, 200.0):
        runner = Runner(EngineConfig(clip=("zclip", zclip)))
        for norm in np.exp(0.1 * np.random.default_rng(0).normal(size=60)):
            runner.step(grad_norm=norm)
        left.append(spike * float(runner.step(grad_norm=spike).grad_scale))
    assert left[1] < 0.95 * left[0]


@pytest.mark.parametrize("factor", [10.0, 1e3, 1e6])
def test_a_higher_level_is_followed_geometrically(factor):
    left = passed([1.0] * 100, [factor] * 30)[100:]
    steps = int(np.argmax(left > 0.999 * factor))
    assert steps == max(0, int(np.ceil(np.log(factor) / np.log(RULE.ratio) - 1e-6)) - 1)
    np.testing.assert_allclose(left[steps:], factor, rtol=1e-6)


@pytest.mark.parametrize(
    "before",
    [[0.0] * 50, [1e-11] * 50, [1e-11] + [1.0] * 49, [float("nan")] * 50, [1e6] + [1e-3] * 2400],
    ids=["zeros", "tiny", "a tiny first norm", "nan", "a huge first norm"],
)
def test_nothing_locks_in(before):
    left = passed(before, [1.0] * 60)
    np.testing.assert_allclose(left[-20:], 1.0, rtol=1e-5)


def test_after_a_huge_first_norm_spikes_are_clipped_again():
    left = passed([1e3], [1.0] * 400, [100.0])
    assert left[-1] < HELD


def test_garbage_in_warm_up_raises_the_limit_by_one_factor():
    left = passed([1.0] * 5, [1e6], [1.0] * 20, [1000.0])
    assert left[5] == 1e6, "the first ten pass"
    assert left[-1] < HELD * RULE.ratio


def test_a_class_in_batches_of_its_own_passes_whole_after_a_few():
    """One batch in 50, four times what passes at once."""
    values, large = np.ones(1000), np.float32(4 * RULE.ratio)
    values[49::50] = large
    left = passed(list(values))
    assert (left[49:600:50][8:] == large).all()
    assert left[49] < HELD


def test_single_garbage_batches_are_held_to_the_ratio_again_and_again():
    values = np.ones(1000)
    values[199::200] = 1e3
    left = passed(list(values))[199::200]
    assert left.max() < HELD
