"""Clipping rules: ZClip against its authors' package, faults, and level shifts.

The package computes in double precision and adds 1e-6 to sigma, so the factors agree to 2e-4 on
positive, finite norms without a lasting shift and with more noise than one percent of the mean.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from zclip import ZClip

from healcore.core.clipping import RULES
from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals
from healcore.core.tree import leaves
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


# -- NaN, Inf, zero and constant norms, in warm-up and after it -----------------------------------

CLIPS = {
    "zclip": RULES["zclip"](max_norm=None),
    "fixed": RULES["fixed"](max_norm=2.0),
    "autoclip": RULES["autoclip"](percentile=90.0),
    "adagc": RULES["adagc"](warmup_steps=25, max_norm=100.0),
}
FAULTS = (
    (0, [np.nan]),
    (10, [np.inf]),
    (60, [-np.inf]),
    (0, [-3.0]),
    (10, [3e38]),
    (60, [0.0]),
    (0, [np.nan] * 40),
    (10, [0.0] * 40),
    (60, [np.nan, np.inf, 0.0] * 20),
)
"""The step at which each begins, and its norms."""


def run(clip: str, norms) -> tuple[np.ndarray, np.ndarray, Runner]:
    """Factors and skips of one run."""
    per_tensor = clip == "adagc"
    runner = Runner(EngineConfig(clip=(clip, CLIPS[clip])), groups=int(per_tensor))
    factors, skips = [], []
    for norm in norms:
        extra = {"group_norms": [norm]} if per_tensor else {}
        decision = runner.step(grad_norm=norm, **extra)
        factors.append(float(decision.group_scale[0] if per_tensor else decision.grad_scale))
        skips.append(bool(decision.skip))
    return np.array(factors), np.array(skips), runner


@pytest.mark.parametrize("clip", CLIPS)
def test_the_steps_after_a_fault_are_judged_as_if_it_had_not_been(clip):
    norms = [*np.exp(0.05 * np.random.default_rng(0).normal(size=160)), 1e3]
    clean, _, _ = run(clip, norms)
    assert clean[-1] < 0.3, "x1000 at the end is clipped"
    for at, fault in FAULTS:
        got, skips, runner = run(clip, [*norms[:at], *fault, *norms[at:]])
        inserted = np.arange(at, at + len(fault))
        np.testing.assert_array_equal(np.delete(got, inserted), clean)
        wrong = np.array(fault)
        bad = ~np.isfinite(wrong) | (wrong < 0) | (wrong > 1e15)
        np.testing.assert_array_equal(skips[inserted], bad)
        assert not np.delete(skips, inserted).any()
        assert all(np.isfinite(leaf).all() for leaf in leaves(runner.state))


# -- a true level shift is escaped within a stated bound ------------------------------------------

BEFORE, AFTER = 400, 800
LEARNING_CLIPS = {
    "zclip": ("zclip", RULES["zclip"](max_norm=None)),
    "zclip-mean": ("zclip", RULES["zclip"](max_norm=None, target="mean")),
    "zclip-max": ("zclip", RULES["zclip"](max_norm=None, target="max")),
    "autoclip": ("autoclip", RULES["autoclip"](window=100)),
    "adagc": ("adagc", RULES["adagc"](max_norm=1e9)),
}
SHIFTS = {
    "none": (1.0, 1), "x1.5": (1.5, 1), "x2": (2.0, 1), "x3": (3.0, 1), "ramp to x3": (3.0, 20),
}  # fmt: skip
NOISES = (0.0, 0.1, 0.3)
"""Scales of the lognormal noise of the norms."""
PAGE = (Path(__file__).parents[2] / "docs" / "detectors.md").read_text()
ROWS = re.findall(r"^`([\w-]+)` \| (\d+) \| (\d+) \| (\d+)$", PAGE, flags=re.M)
BOUNDS = {name: tuple(map(int, steps)) for name, *steps in ROWS}
"""Steps until the clipping is back, by noise."""


def every_run(rule: str, config: NamedTuple) -> dict[tuple[float, str], np.ndarray]:
    """1 - scale at each step, (steps, lanes), by noise and shift: all as lanes of one run."""
    kinds, parts = [], []
    for noise in NOISES:
        rng = np.random.default_rng(0)
        lanes = 1 if noise == 0 else 20 if rule == "autoclip" else 150
        norms = np.exp(noise * rng.normal(size=(BEFORE + AFTER, lanes)))
        for shift, (factor, length) in SHIFTS.items():
            rise = np.clip((np.arange(BEFORE + AFTER) - BEFORE + 1) / length, 0, 1)
            kinds.append((noise, shift))
            parts.append((norms * np.exp(np.log(factor) * rise)[:, None]).astype(np.float32))
    groups = 1 if rule == "adagc" else 0
    engine = Engine(EngineConfig(clip=(rule, config)))
    every = np.concatenate(parts, axis=1)
    state, rows = engine.init(groups=groups, batch=(every.shape[1],)), []
    for norm in every:
        per_group = norm[:, None] if groups else None
        signals = Signals(grad_norm=norm, group_norms=per_group)
        state, decision = engine.step(state, signals, xp=np)
        rows.append(decision.group_scale[:, 0] if groups else decision.grad_scale)
    ends = np.cumsum([part.shape[1] for part in parts])
    return dict(zip(kinds, np.split(1 - np.array(rows), ends[:-1], axis=1), strict=True))


def steps_until_back(taken: np.ndarray, usual: np.ndarray) -> int:
    """First step from which on 25-step means stay within a tenth of the usual ones."""

    def means(x: np.ndarray) -> np.ndarray:
        return np.convolve(x[BEFORE:].mean(1), np.ones(25) / 25, "valid")

    high = np.flatnonzero(means(taken) > 1.1 * means(usual) + 0.005)
    return int(high[-1]) + 1 if len(high) else 0


@pytest.mark.parametrize("clip", LEARNING_CLIPS)
def test_clipping_is_back_at_its_usual_amount(clip):
    runs = every_run(*LEARNING_CLIPS[clip])
    for noise, bound in zip(NOISES, BOUNDS[clip], strict=True):
        for shift in SHIFTS:
            steps = steps_until_back(runs[noise, shift], runs[noise, "none"])
            print(f"{clip} {shift} noise {noise}: {steps}")
            assert steps <= bound, f"{shift}, noise {noise}: {steps} steps"
