"""AutoClip's histogram against NumPy's percentile of the norms themselves."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.clipping import RULES
from healcore.core.engine import EngineConfig
from tests.core.engine_runner import Runner

BIN = 2 ** (1 / 16)


@pytest.mark.parametrize("spread", [0.01, 0.3, 3.0])
@pytest.mark.parametrize("percentile", [5.0, 10.0, 50.0, 90.0])
def test_within_one_bin_above_the_percentile(percentile, spread):
    rng = np.random.default_rng(int(percentile))
    norms = np.exp(spread * rng.normal(size=390)).astype(np.float32)
    config = RULES["autoclip"](percentile=percentile, window=200)
    runner = Runner(EngineConfig(clip=("autoclip", config)))
    for i, norm in enumerate(norms):
        runner.step(grad_norm=norm)
        exact = np.percentile(norms[: i + 1], percentile, method="inverted_cdf")
        threshold = float(runner.state.last.threshold)
        assert exact * (1 - 1e-6) <= threshold <= exact * BIN * (1 + 1e-6), f"step {i}"


@pytest.mark.parametrize("factor", [0.01, 1.5, 100.0])
def test_it_forgets_within_five_windows(factor):
    rng = np.random.default_rng(0)
    window = 60
    config = RULES["autoclip"](percentile=30.0, window=window)
    runner = Runner(EngineConfig(clip=("autoclip", config)))
    runner.feed(grad_norm=np.exp(0.2 * rng.normal(size=400)))
    after = factor * np.exp(0.2 * rng.normal(size=5 * window))
    runner.feed(grad_norm=after)
    exact = np.percentile(after, 30.0)
    assert abs(np.log(float(runner.state.last.threshold) / exact)) < 0.15


def test_the_memory_does_not_grow():
    config = RULES["autoclip"](window=50)
    runner = Runner(EngineConfig(clip=("autoclip", config)))
    for norm in np.exp(np.random.default_rng(0).normal(size=500)):
        runner.step(grad_norm=norm)
        assert runner.state.clip.counts.sum() <= 100


def test_norms_off_the_scale_go_into_the_last_bins():
    config = RULES["autoclip"](percentile=50.0)
    runner = Runner(EngineConfig(clip=("autoclip", config)))
    decisions = runner.feed(grad_norm=[1e-11, 1e14, 1e-11, 1e14, 1e-11])
    assert runner.state.clip.counts[[0, -1]].tolist() == [3, 2]
    assert all(0 < d.grad_scale <= 1 for d in decisions)
