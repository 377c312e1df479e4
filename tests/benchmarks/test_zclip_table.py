"""The tables of the ZClip paper: spikes counted as defined, the same runs in torch and JAX."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest

from benchmarks import zclip_table
from benchmarks.zclip_table import ARMS, SCALES, Run, batches, final_loss, run_one, spikes

SCALE = dataclasses.replace(SCALES["quick"], steps=40)


def noise(steps: int) -> np.ndarray:
    return 1.0 + 0.1 * np.random.default_rng(0).normal(size=steps)


def test_noise_has_no_spike():
    assert spikes(noise(2000)) == 0


def test_a_spike_is_counted_once_while_it_lasts():
    losses = noise(400)
    losses[200:215] += 3.0
    losses[300] = math.nan
    assert spikes(losses) == 2


def test_the_first_steps_have_no_spike():
    losses = noise(200)
    losses[:40] += 5.0
    losses[30] = math.inf
    assert spikes(losses) == 0


def test_a_diverged_run_ends_at_the_uniform_loss():
    assert final_loss(np.full(100, math.nan), 64) == pytest.approx(math.log(64))
    assert final_loss(np.full(100, 1e9), 64) == pytest.approx(math.log(64))
    assert final_loss(np.full(100, 0.5), 64) == 0.5


def test_the_language_follows_its_chain():
    """Each token has one likely successor, the same in all seeds."""
    scale = SCALES["small"]
    pairs = [np.zeros((scale.vocabulary, scale.vocabulary)) for _ in range(2)]
    for seed, counts in enumerate(pairs):
        tokens = batches(scale, seed)
        np.add.at(counts, (tokens[..., :-1], tokens[..., 1:]), 1)
        share = (counts.max(1) / counts.sum(1)).mean()
        assert 0.9 < share < 0.95  # 1 / zeta(4) = 0.924
    assert (pairs[0].argmax(1) == pairs[1].argmax(1)).all()


@pytest.mark.parametrize("arm", ARMS)
def test_each_arm_trains_in_torch(arm: str):
    found = run_one(Run("torch", arm, 1e-2, 0), SCALE)
    assert 0.3 < found["final"] < math.log(SCALE.vocabulary)


@pytest.mark.parametrize("arm", ["none", "fixed", "autoclip"])
def test_jax_trains_as_torch(arm: str):
    """The model, the data, the optimizer and the written rules are the same in both."""
    made = [run_one(Run(framework, arm, 1e-2, 1), SCALE) for framework in ("torch", "jax")]
    assert made[0]["final"] == pytest.approx(made[1]["final"], abs=2e-3)


def test_a_verdict_needs_an_interval_without_zero():
    assert zclip_table.verdict(-1.0, 0.5, lower=True) == "yes"
    assert zclip_table.verdict(-1.0, 0.5, lower=False) == "no"
    assert zclip_table.verdict(-1.0, 2.0, lower=True) == "open"
    assert zclip_table.verdict(0.0, 0.0, lower=True) == "open"


def test_the_interval_is_students():
    mean, half = zclip_table.interval([1.0, 2.0, 3.0])
    assert (mean, half) == pytest.approx((2.0, 4.3027 / math.sqrt(3)), rel=1e-4)


def made(arm: str, finals: list[float], many: int) -> list[dict]:
    """Runs of one seed over the learning rates 0.01, 0.02 and 0.03."""
    rates = (0.01, 0.02, 0.03)
    return [
        {**Run("jax", arm, rate, 0)._asdict(), "final": final, "spikes": many}
        for rate, final in zip(rates, finals, strict=True)
    ]


def test_differences_are_to_the_fixed_clip():
    """Fixed 1.0 diverges at 0.03, the arm already at 0.02; its later good end does not count."""
    runs = made("fixed", [0.4, 0.5, 3.0], 1) + made("zclip", [0.3, 3.0, 0.5], 3)
    fewer, higher, best, same = zclip_table.differences(runs, "jax", "zclip")
    assert (fewer, higher) == ([2.0], [-1.0])
    assert best == pytest.approx([-0.1])
    assert same == pytest.approx([(-0.1 + 2.5) / 2])


def test_a_rate_is_usable_only_with_all_lower_rates():
    runs = made("fixed", [0.4, 0.5, 3.0], 0) + made("zclip", [3.0, 0.5, 0.5], 0)
    assert zclip_table.differences(runs, "jax", "zclip")[1] == [-2.0]
