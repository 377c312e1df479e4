"""Each clipping rule survives NaN, Inf, zero and constant norms, in warm-up and after it."""

from __future__ import annotations

import functools
import itertools

import numpy as np
import pytest

from healcore.core.clipping import RULES
from healcore.core.engine import EngineConfig
from healcore.core.tree import leaves
from tests.core.engine_runner import Runner

CLIPS = {
    "zclip": RULES["zclip"](max_norm=None),
    "fixed": RULES["fixed"](max_norm=2.0),
    "autoclip": RULES["autoclip"](percentile=90.0),
    "adagc": RULES["adagc"](warmup_steps=25, max_norm=100.0),
}
FAULTS = {
    "nan": [np.nan],
    "inf": [np.inf],
    "minus inf": [-np.inf],
    "negative": [-3.0],
    "overflow": [3e38],
    "zero": [0.0],
    "row of nan": [np.nan] * 40,
    "row of zeros": [0.0] * 40,
    "nan, inf, zero in turn": [np.nan, np.inf, 0.0] * 20,
}


def run(clip: str, norms) -> tuple[np.ndarray, np.ndarray, Runner]:
    """Factors and skips of one run."""
    per_tensor = clip == "adagc"
    runner = Runner(EngineConfig(clip=(clip, CLIPS[clip])), groups=int(per_tensor))
    factors, skips = [], []
    for norm in norms:
        extra = {"group_norms": [norm]} if per_tensor else {}
        decision = runner.step(grad_norm=norm, **extra)
        scale = decision.group_scale[0] if per_tensor else decision.grad_scale
        factors.append(float(scale))
        skips.append(bool(decision.skip))
    return np.array(factors), np.array(skips), runner


def healthy(steps: int, seed: int = 0) -> list[float]:
    return list(np.exp(0.05 * np.random.default_rng(seed).normal(size=steps)))


@functools.cache
def clean(clip: str) -> np.ndarray:
    """The factors of a run without a fault."""
    return run(clip, [*healthy(160), 1e3])[0]


PLACES = itertools.cycle([0, 10, 60])
"""Steps of the faults: each rule has each of them, with other faults."""


@pytest.mark.parametrize(
    ("clip", "fault", "at"),
    [(clip, fault, next(PLACES)) for clip in CLIPS for fault in (*FAULTS, "nan")],
)
def test_the_steps_after_a_fault_are_judged_as_if_it_had_not_been(clip, fault, at):
    norms, faults = healthy(160), FAULTS[fault]
    got, skips, runner = run(clip, [*norms[:at], *faults, *norms[at:], 1e3])
    without = np.concatenate([got[:at], got[at + len(faults) :]])
    np.testing.assert_array_equal(without, clean(clip))
    wrong = np.array(faults)
    bad = ~np.isfinite(wrong) | (wrong < 0) | (wrong > 1e15)
    np.testing.assert_array_equal(skips[at : at + len(faults)], bad)
    assert not skips[:at].any()
    assert not skips[at + len(faults) :].any()
    assert all(np.isfinite(leaf).all() for leaf in leaves(runner.state))
    assert got[-1] < 0.3, "x1000 at the end is clipped"


@pytest.mark.parametrize(("clip", "at"), [("zclip", 0), ("zclip", 20), ("adagc", 0), ("adagc", 3)])
def test_a_spike_in_warm_up_does_not_hide_later_ones(clip, at):
    norms = healthy(120)
    norms[at], norms[100] = 1000.0, 20.0
    factors, _, _ = run(clip, norms)
    assert factors[100] < 0.2


@pytest.mark.parametrize("clip", CLIPS)
def test_the_clipped_norm_is_within_the_threshold(clip):
    """`scale * norm` never exceeds the limit, however large the norm."""
    for norm in (5.0, 1e3, 1e8, 1e14, 9e14):
        per_tensor = clip == "adagc"
        factors, skips, runner = run(clip, [*healthy(150), norm])
        limit = (
            float(CLIPS[clip].ratio * runner.state.clip.gamma[0])
            if per_tensor
            else float(runner.state.last.threshold)
        )
        assert not skips[-1]
        assert 0 <= factors[-1] * norm <= limit * (1 + 1e-5)
