"""Every clipping rule that learns its limit escapes a true level shift, within a stated bound.

After a lasting rise of the norm (x1.5, x2, x3, and a ramp to x3 over 20 steps) the share of the
gradient that is taken away has to be what it is for the same noise without a rise. The published
ZClip never gets there (1000 of 1000 steps clipped); AdaGC as published needs 645 to 1,633 steps
for x2.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from healcore.core.clipping import RULES
from healcore.core.engine import Engine, EngineConfig
from healcore.core.signals import Signals

BEFORE, AFTER = 400, 800
ZClip, AutoClip, AdaGC = (RULES["zclip"], RULES["autoclip"], RULES["adagc"])
CLIPS = {
    "zclip": ("zclip", ZClip(max_norm=None)),
    "zclip-mean": ("zclip", ZClip(max_norm=None, target="mean")),
    "zclip-max": ("zclip", ZClip(max_norm=None, target="max")),
    "autoclip": ("autoclip", AutoClip(window=100)),
    "adagc": ("adagc", AdaGC(max_norm=1e9)),
}
SHIFTS = {
    "none": (1.0, 1), "x1.5": (1.5, 1), "x2": (2.0, 1), "x3": (3.0, 1), "ramp to x3": (3.0, 20),
}  # fmt: skip
NOISES = (0.0, 0.1, 0.3)
"""Scales of the lognormal noise of the norms."""
# Steps until the clipping is back, by noise.
# docs/detectors.md has the same table.
BOUNDS = {
    "zclip": (25, 60, 120),
    "zclip-mean": (25, 60, 200),
    "zclip-max": (25, 60, 120),
    "autoclip": (500, 500, 500),
    "adagc": (50, 450, 450),
}


@functools.cache
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


def test_the_page_has_these_bounds():
    page = (Path(__file__).parents[2] / "docs" / "detectors.md").read_text()
    rows = re.findall(r"^`([\w-]+)` \| (\d+) \| (\d+) \| (\d+)$", page, flags=re.M)
    assert {name: tuple(map(int, steps)) for name, *steps in rows} == BOUNDS


@pytest.mark.parametrize("shift", [shift for shift in SHIFTS if shift != "none"])
@pytest.mark.parametrize("clip", CLIPS)
def test_clipping_is_back_at_its_usual_amount(clip, shift):
    runs = every_run(*CLIPS[clip])
    for noise, bound in zip(NOISES, BOUNDS[clip], strict=True):
        steps = steps_until_back(runs[noise, shift], runs[noise, "none"])
        print(f"{clip} {shift} noise {noise}: {steps}")
        assert steps <= bound, f"noise {noise}: {steps} steps"
