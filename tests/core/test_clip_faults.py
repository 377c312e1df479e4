"""Each clipping rule survives NaN, Inf, zero and constant norms, in warm-up and after it."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from healcore.core.clipping import RULES
from healcore.core.detectors import DETECTORS
from healcore.core.engine import EngineConfig
from healcore.core.tree import leaves
from tests.core.engine_runner import Runner

CLIPS = {
    "zclip": RULES["zclip"].ZClipConfig(max_norm=None),
    "fixed": RULES["fixed"].FixedConfig(max_norm=2.0),
    "autoclip": RULES["autoclip"].AutoClipConfig(percentile=90.0),
    "adagc": RULES["adagc"].AdaGCConfig(warmup_steps=25, max_norm=100.0),
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
    return run(clip, [*healthy(160), 50.0])[0]


@pytest.mark.parametrize("at", [0, 10, 60])
@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("clip", CLIPS)
def test_the_steps_after_a_fault_are_judged_as_if_it_had_not_been(clip, fault, at):
    norms, faults = healthy(160), FAULTS[fault]
    got, skips, runner = run(clip, [*norms[:at], *faults, *norms[at:], 50.0])
    without = np.concatenate([got[:at], got[at + len(faults) :]])
    np.testing.assert_array_equal(without, clean(clip))
    wrong = np.array(faults)
    bad = ~np.isfinite(wrong) | (wrong < 0) | (wrong > 1e15)
    np.testing.assert_array_equal(skips[at : at + len(faults)], bad)
    assert not skips[:at].any()
    assert not skips[at + len(faults) :].any()
    assert all(np.isfinite(leaf).all() for leaf in leaves(runner.state))
    assert got[-1] < 0.3, "x50 at the end is clipped"


@pytest.mark.parametrize("clip", CLIPS)
def test_a_constant_norm_and_a_hundredth_of_a_percent_more(clip):
    factors, _, _ = run(clip, [0.5] * 200 + [0.5 * 1.0001] * 5)
    assert (factors == 1).all()


@pytest.mark.parametrize("clip", ["zclip", "adagc"])
def test_a_spike_in_warm_up_does_not_hide_later_ones(clip):
    for at in (0, 3, 20):
        norms = healthy(120)
        norms[at] = 1000.0
        norms[100] = 20.0
        factors, _, _ = run(clip, norms)
        assert factors[100] < 0.2, f"spike of the warm-up at {at}"


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


def test_a_tensor_with_a_zero_norm_in_warm_up_still_learns():
    """Published AdaGC: gamma is 0 from then on, and the tensor never moves again."""
    config = CLIPS["adagc"]
    runner = Runner(EngineConfig(clip=("adagc", config)), groups=2)
    for i in range(60):
        decision = runner.step(grad_norm=1.0, group_norms=[0.0 if i == 5 else 0.6, 0.8])
    np.testing.assert_array_equal(decision.group_scale, [1, 1])


def test_per_tensor_norms_of_one_bad_tensor_skip_the_step():
    runner = Runner(EngineConfig(clip=("adagc", CLIPS["adagc"])), groups=3)
    decision = runner.step(grad_norm=1.0, group_norms=[1.0, np.nan, 1.0])
    assert decision.skip
    np.testing.assert_array_equal(decision.group_scale, [1, 1, 1])


def let_through(
    spikes: dict[int, float],
    losses: Sequence[float] = (),
    *,
    steps: int = 240,
    lone_share: float = 0.0,
    with_loss: bool = True,
) -> dict[int, float]:
    """Norm that is left of each spike; all others are 1.

    Args:
        spikes: norm by step.
        losses: of the spikes, times the usual one; 50 for those that are not named.
        steps: of the run, or up to the last spike.
        lone_share: of the rule.
        with_loss: False for a rule that sees norms alone.
    """
    rule = RULES["zclip"].ZClipConfig(max_norm=None, lone_ratio=1.1, lone_share=lone_share)
    factors = dict(itertools.zip_longest(spikes, losses, fillvalue=50.0))
    watch = DETECTORS["loss_spike"].Config()
    runner = Runner(EngineConfig(clip=("zclip", rule), detectors=(("loss_spike", watch),)))
    left = {}
    for step, loss in enumerate(healthy(max(steps, *(at + 1 for at in spikes)))):
        norm, loss = spikes.get(step, 1.0), factors.get(step, 1.0) * loss
        decision = runner.step(grad_norm=norm, **({"loss": loss} if with_loss else {}))
        if step in spikes:
            left[step] = norm * float(decision.grad_scale)
    return left


def test_garbage_that_comes_again_and_again_is_let_through_no_more_of():
    left = list(let_through(dict.fromkeys(range(80, 240, 20), 100.0)).values())
    assert left[0] > 1.05
    assert max(left[1:]) <= left[0] * (1 + 1e-5)


def test_a_rare_class_is_let_through_more_and_more_of():
    left = list(let_through(dict.fromkeys(range(80, 240, 20), 20.0)).values())
    assert left == sorted(left)
    assert left[-1] > 1.5 * left[0]


def test_far_spikes_in_a_row_are_not_taken_for_garbage():
    left = let_through({80: 100.0, 81: 100.0, 120: 100.0})
    assert left[120] > 1.04 * left[80]


EVERY_20 = dict.fromkeys(range(80, 240, 20), 20.0)


def test_spikes_whose_losses_rise_are_brought_down_like_any_other():
    """Noise with heavy tails: nothing of it can be learnt."""
    left = list(let_through(EVERY_20, [50, 20, 80, 400, 30, 200, 900, 60]).values())
    assert left[0] > 1.05
    assert max(left[4:]) < 1.02, "by then the average has been passed twice"


def test_spikes_whose_losses_fall_are_let_through_again():
    up = [50, 100, 150, 200]
    spikes = dict.fromkeys(range(80, 440, 20), 20.0)
    left = list(let_through(spikes, up + [40.0 - i for i in range(14)]).values())
    assert left[3] < 1.02
    assert left[-1] > 1.05


def test_losses_that_differ_little_are_those_of_one_kind_of_batch():
    losses = [50, 54, 52, 55, 49, 53, 55, 51]
    left = list(let_through(EVERY_20, losses).values())
    assert left == sorted(left)
    assert left[-1] > 1.5 * left[0]


def test_without_a_loss_nothing_is_known_of_the_spikes():
    left = list(let_through(EVERY_20, with_loss=False).values())
    assert left == sorted(left)
    assert left[-1] > 1.5 * left[0]


def test_a_spike_with_an_ordinary_loss_does_not_use_up_the_turn_of_the_next_batch():
    small_before = let_through({119: 1.3, 120: 20.0}, [1.0, 50.0])
    assert small_before[120] >= let_through({120: 20.0})[120]
    large_before = let_through({119: 20.0, 120: 20.0})
    assert large_before[120] < 1.02


def test_after_long_without_a_spike_one_may_be_further_out():
    """`lone_limit` is 32: at 40 means a spike gets nothing of what is saved, until that is 40."""
    soon = let_through({150: 40.0}, lone_share=0.125)[150]
    late = let_through({400: 40.0}, lone_share=0.125)[400]
    assert soon < 1.4
    assert late > 1.5 * soon
