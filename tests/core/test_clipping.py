"""Clipping rules: ZClip against its authors' package, and level shifts.

The package computes in double precision and adds 1e-6 to sigma, so the factors agree to 2e-4 on
positive, finite norms without a lasting shift and with more noise than one percent of the mean.
"""

import re
from typing import NamedTuple

import numpy as np
import pytest
import torch
from zclip import ZClip

from healcore.core.engine import EngineConfig
from tests.core.engine_runner import Runner
from tests.core.policies import RULES
from tests.packaging.page_text import text

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
    rule = ZClip(**settings)
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
def test_zclip_has_the_published_factors_and_statistics(target, max_norm):
    runs = np.stack([noisy_norms(seed) for seed in range(3)], axis=1)
    config = RULES["zclip"](target=target, max_norm=max_norm)
    runner = Runner(EngineConfig(clip=config), lanes=3)
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


BEFORE, AFTER = 400, 800
LEARNING_CLIPS = {
    "zclip": ("zclip", RULES["zclip"](max_norm=None)),
    "zclip-mean": ("zclip", RULES["zclip"](max_norm=None, target="mean")),
    "zclip-max": ("zclip", RULES["zclip"](max_norm=None, target="max")),
    "autoclip": ("autoclip", RULES["autoclip"](window=100)),
    "adagc": ("adagc", RULES["adagc"](max_norm=1e9)),
}
SHIFTS = {  # the first is the usual amount
    "none": (1.0, 1), "x1.5": (1.5, 1), "x2": (2.0, 1), "x3": (3.0, 1), "ramp to x3": (3.0, 20),
}  # fmt: skip
NOISES = (0.0, 0.1, 0.3)
"""Scales of the lognormal noise of the norms."""
ROWS = re.findall(r"^`([\w-]+)` \| (\d+) \| (\d+) \| (\d+)$", text("other-tools.md"), flags=re.M)
BOUNDS = {name: tuple(map(int, steps)) for name, *steps in ROWS}
"""Steps until the clipping is back, by noise."""


def amounts(rule: str, config: NamedTuple, norms: np.ndarray) -> np.ndarray:
    """1 - scale at each step, (steps, lanes)."""
    groups = 1 if rule == "adagc" else 0
    runner = Runner(EngineConfig(clip=config), groups=groups, lanes=norms.shape[1])
    scales = []
    for norm in norms:
        decision = runner.step(grad_norm=norm, group_norms=norm[:, None] if groups else None)
        scales.append(decision.group_scale[:, 0] if groups else decision.grad_scale)
    return 1 - np.array(scales)


def steps_until_back(taken: np.ndarray, usual: np.ndarray) -> int:
    """First step from which on 25-step means stay within a tenth of the usual ones."""

    def means(x: np.ndarray) -> np.ndarray:
        return np.convolve(x[BEFORE:].mean(1), np.ones(25) / 25, "valid")

    high = np.flatnonzero(means(taken) > 1.1 * means(usual) + 0.005)
    return int(high[-1]) + 1 if len(high) else 0


@pytest.mark.slow
@pytest.mark.parametrize("clip", LEARNING_CLIPS)
def test_clipping_is_back_at_its_usual_amount(clip):
    """After a true level shift, within the steps that the page states."""
    rule, config = LEARNING_CLIPS[clip]
    steps = np.arange(BEFORE + AFTER)
    rises = [f ** np.clip((steps - BEFORE + 1) / length, 0, 1) for f, length in SHIFTS.values()]
    for noise, bound in zip(NOISES, BOUNDS[clip], strict=True):
        lanes = 1 if noise == 0 else 20 if rule == "autoclip" else 150
        norms = np.exp(noise * np.random.default_rng(0).normal(size=(len(steps), lanes)))
        every = np.stack([norms * rise[:, None] for rise in rises], axis=1)
        taken = amounts(rule, config, every.reshape(len(steps), -1)).reshape(every.shape)
        for place, shift in enumerate(SHIFTS):
            found = steps_until_back(taken[:, place], taken[:, 0])
            print(f"{clip} {shift} noise {noise}: {found}")
            assert found <= bound, f"{shift}, noise {noise}: {found} steps"
