"""The comparison detects a single bit, and the fuzzed traces contain what they claim."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from healcore.core import numerics
from healcore.core.engine import Engine
from healcore.core.tree import map_leaves
from tests.core import fuzz, policies
from tests.parity import lockstep


def states():
    engine = Engine(policies.full("zclip"))
    return map_leaves(lambda leaf: np.stack([leaf, leaf]), engine.init(batch=(3,)))


def test_equal_trees_have_no_difference():
    assert lockstep.first_difference(states(), states()) is None


@pytest.mark.parametrize("field", ["mean", "var"])
def test_one_ulp_is_a_difference(field):
    other = states()
    leaf = getattr(other.clip, field)
    leaf[1, 2] = np.nextafter(leaf[1, 2], np.float32(1))
    found = lockstep.first_difference(states(), other)
    assert found is not None
    assert found.startswith(f"clip.{field}[1, 2]")


def test_the_sign_of_zero_a_dtype_and_a_shape_are_differences():
    a = (np.zeros(3, np.float32),)
    assert lockstep.first_difference(a, (-a[0],)) is not None
    assert lockstep.first_difference(a, (np.zeros(3, np.float64),)) is not None
    assert lockstep.first_difference(a, (np.zeros((3, 1), np.float32),)) is not None


def test_a_fused_multiply_add_in_the_core_would_be_seen(monkeypatch):
    """The planted error: `ema` as one would write it first."""

    def ema(mean, value, rate, learn, *, xp):
        return xp.where(learn, mean + rate * (value - mean), mean)

    monkeypatch.setattr(numerics, "ema", ema)
    only = tuple(each for each in policies.full().detectors if each[0] == "overfit")
    config = policies.full("fixed", detectors=only)
    trace = fuzz.signals(np.random.default_rng(0), 200, 100)
    a = np.float32(0.1)
    x = jnp.arange(1000, dtype=jnp.float32) / 7
    fused = jax.jit(lambda x: x + a * (x * x - x))(x)
    if np.array_equal(fused, np.asarray(x) + a * (np.asarray(x) ** 2 - np.asarray(x))):
        pytest.skip("XLA fuses nothing on this CPU")
    with pytest.raises(AssertionError, match=r"numpy and jax from step"):
        lockstep.steps_equal(config, [trace], ("jax",), lanes=100)


def test_the_fuzzed_traces_contain_every_feature():
    trace = fuzz.signals(np.random.default_rng(1), 400, 550)
    for part in (trace.loss, trace.grad_norm):
        finite = np.isfinite(part)
        for odd in (np.isnan(part), np.isposinf(part), np.isneginf(part), part == 0):
            assert odd.any()
        assert (np.abs(part[(part != 0) & finite]) < 1e-38).any(), "subnormals"
        assert (np.abs(part[finite]) > 1e38).any()
        assert (~finite | (part == np.where(finite, fuzz.bf16(part), part))).all(0).any(), "bf16"
    assert (trace.loss < 0).any()
    assert trace.change_expected.any()
    assert trace.externally_skipped.any()
    assert np.isfinite(trace.eval_loss).any()
    rate = trace.learning_rate
    for constant in (trace.loss, rate):
        assert (constant == constant[0]).all(0).any()
    assert ((rate[1] > rate[0]) & (rate[1:] > 0).all(0)).any(), "a warm-up"
    for odd in (np.isnan(rate), rate < 0, rate == 0):
        assert odd.any()
