"""ZClip against its authors' package.

The package computes in double precision and adds 1e-6 to sigma, so the factors agree to 2e-4 on
positive, finite norms without a lasting shift and with more noise than one percent of the mean.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from zclip import ZClip

from healcore.core.clipping import RULES
from healcore.core.engine import EngineConfig
from tests.core.engine_runner import Runner

MODES = {
    "reciprocal": {"mode": "zscore", "clip_option": "adaptive_scaling"},
    "mean": {"mode": "zscore", "clip_option": "mean"},
    "max": {"mode": "percentile"},
}
TOLERANCE = 2e-4


def noisy_norms(seed: int) -> np.ndarray:
    """Noise about a slow drift, and a spike now and then."""
    rng = np.random.default_rng(seed)
    steps = np.arange(600)
    level = 5 + 0.3 * np.sin(steps / 150)
    spikes = np.where((rng.random(600) < 0.02) & (steps > 30), rng.uniform(2, 50, 600), 1.0)
    return (level * np.exp(0.1 * rng.normal(size=600)) * spikes).astype(np.float32)


def published(values: np.ndarray, **settings) -> tuple[np.ndarray, np.ndarray, ZClip]:
    """The package's factors and means on gradients of these noisy_norms."""
    rule = ZClip(alpha=0.97, warmup_steps=25, **settings)
    module = torch.nn.Linear(1, 1, bias=False)
    factors, means = [], []
    for value in values:
        module.weight.grad = torch.full((1, 1), float(value))
        rule.step(module)
        factors.append(float(module.weight.grad) / float(value))
        means.append(rule.mean if rule.initialized else np.nan)
    return np.array(factors), np.array(means), rule


@pytest.mark.parametrize(
    ("target", "max_norm"),
    [("reciprocal", None), ("reciprocal", 6.0), ("mean", None), ("max", 6.0)],
)
def test_the_same_factors_and_statistics(target, max_norm):
    runs = np.stack([noisy_norms(seed) for seed in range(3)], axis=1)
    config = RULES["zclip"](target=target, max_norm=max_norm)
    runner = Runner(EngineConfig(clip=("zclip", config)), lanes=3)
    got, ours = [], []
    for values in runs:
        got.append(runner.step(grad_norm=values).grad_scale)
        ours.append(runner.state.clip.mean)
    for lane in range(3):
        factors, means, rule = published(
            runs[:, lane], z_thresh=2.5, max_grad_norm=max_norm, **MODES[target]
        )
        assert (factors[25:] < 1).sum() >= 5
        np.testing.assert_allclose(np.array(got)[:, lane], factors, rtol=TOLERANCE)
        np.testing.assert_allclose(np.array(ours)[24:, lane], means[24:], rtol=TOLERANCE)
        assert rule.var is not None
        np.testing.assert_allclose(runner.state.clip.var[lane], rule.var, rtol=10 * TOLERANCE)


def test_the_tolerance_would_notice_another_threshold():
    """A z_threshold of 2.45 instead of 2.5 is detected."""
    values = noisy_norms(0)
    factors, _, _ = published(values, z_thresh=2.5, max_grad_norm=None, **MODES["reciprocal"])
    config = RULES["zclip"](z_threshold=2.45, max_norm=None)
    got = [
        float(d.grad_scale)
        for d in Runner(EngineConfig(clip=("zclip", config))).feed(grad_norm=values)
    ]
    assert not np.allclose(got, factors, rtol=TOLERANCE)
