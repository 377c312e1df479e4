"""Any policy gives the same bits in NumPy, on the host and in torch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import fuzz, policies
from tests.core.random_policies import BOUNDED, engine_configs
from tests.parity import lockstep

any_policy = given(config=engine_configs(), seed=st.integers(0, 1 << 20))


def groups_of(config) -> int:
    return policies.GROUPS if config.clip and config.clip[0] == "adagc" else 0


@settings(max_examples=12, **BOUNDED)
@any_policy
def test_torch_with_lanes(config, seed):
    groups = groups_of(config)
    trace = fuzz.signals(np.random.default_rng(seed), 50, 30, groups=groups)
    lockstep.steps_equal(config, [trace], ("torch",), groups=groups, lanes=30)


@settings(max_examples=12, **BOUNDED)
@any_policy
def test_the_host_with_scalars(config, seed):
    groups = groups_of(config)
    trace = fuzz.signals(np.random.default_rng(seed), 100, 1, groups=groups)
    lockstep.steps_equal(config, [lockstep.scalar(trace, 0)], ("host", "recorded"), groups=groups)


@settings(max_examples=2, **BOUNDED)
@any_policy
def test_jax_with_scalars(config, seed):
    """Few: each policy is a program of its own to compile. Those in test_fuzz have all parts."""
    groups = groups_of(config)
    trace = fuzz.signals(np.random.default_rng(seed), 100, 30, groups=groups)
    lockstep.steps_equal(config, [trace], ("jax-scalars",), groups=groups, lanes=30)


@pytest.mark.stress
@settings(max_examples=60, **BOUNDED)
@any_policy
def test_more(config, seed):
    groups = groups_of(config)
    trace = fuzz.signals(np.random.default_rng(seed), 200, 100, groups=groups)
    others = ("jax-scalars", "jax", "torch")
    lockstep.steps_equal(config, [trace], others, groups=groups, lanes=100)
    one = lockstep.scalar(trace, 0)
    lockstep.steps_equal(config, [one], ("host", "recorded"), groups=groups)
