"""NumPy, JAX jit + scan and torch eager, bit for bit, on fuzzed steps and random policies.

JAX runs lane after lane on 0-d arrays, as in a training step, and for one policy also all lanes
at once, as in a sweep: XLA compiles the two differently. The lanes of the catalogue's detectors are
in test_vmapped_policies. Under `stress` there are millions of steps.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.engine import Engine
from healcore.core.tree import map_leaves
from tests.core import fuzz, policies
from tests.core.random_policies import BOUNDED, engine_configs
from tests.parity import backends, lockstep

STEPS, LANES = 150, 100


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_the_same_bits_in_numpy_jax_and_torch(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(len(clip)), STEPS, LANES, groups=groups)
    against = ("jax-scalars", "torch", *(["jax"] if clip == "zclip" else []))
    compared = lockstep.steps_equal(
        policies.covering(clip), [trace], against, groups=groups, lanes=LANES
    )
    assert compared == STEPS * LANES


def test_the_detectors_of_the_catalogue_too():
    """All in one policy: it is compiled once, and the state of each is compared."""
    trace = fuzz.signals(np.random.default_rng(60), STEPS, LANES)
    config = policies.published(*policies.PUBLISHED)
    lockstep.steps_equal(config, [trace], ("jax-scalars", "torch"), lanes=LANES)


@pytest.mark.stress
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("clip", policies.CLIPS)
def test_more_of_it(clip, seed):
    lanes = 100 if clip == "autoclip" else 1000
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(1000 + seed), 1000, lanes, groups=groups)
    lockstep.steps_equal(
        policies.full(clip), [trace], ("jax-scalars", "jax", "torch"), groups=groups, lanes=lanes
    )


@pytest.mark.stress
@pytest.mark.parametrize("which", policies.PUBLISHED)
def test_more_of_the_catalogue(which):
    trace = fuzz.signals(np.random.default_rng(60), 300, 150)
    lockstep.steps_equal(
        policies.published(which), [trace], ("jax-scalars", "jax", "torch"), lanes=150
    )


# -- a run of its own (0-d arrays) equals its lane; JAX in test_moving ----------------------------


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_numpy_host_and_torch_with_scalars(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(40), STEPS, 4, groups=groups)
    traces = [lockstep.scalar(trace, lane) for lane in range(4)]
    config = policies.covering(clip)
    lockstep.steps_equal(config, traces, ("recorded",), groups=groups)
    lockstep.steps_equal(config, traces[:1], ("torch",), groups=groups)


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_a_lane_is_a_run_of_its_own(clip):
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(42), STEPS, 12, groups=groups)
    engine = Engine(policies.covering(clip))
    run = backends.runner("numpy", engine)
    _, *together = run(engine.init(groups=groups, batch=(12,)), trace)
    alone = backends.runner("recorded", engine)
    for lane in range(0, 12, 3):
        fresh = backends.start("recorded", engine.init(groups=groups))
        _, *single = alone(fresh, lockstep.scalar(trace, lane))
        mine = map_leaves(lambda leaf, lane=lane: leaf[:, lane], tuple(together))
        assert lockstep.first_difference(mine, tuple(single)) is None


# -- random policies ------------------------------------------------------------------------------

any_policy = given(config=engine_configs(), seed=st.integers(0, 1 << 20))


def compared(config, seed, steps, lanes, against):
    """Compares backends on a fuzzed trace of a random policy; one lane is one of scalars."""
    groups = policies.GROUPS if config.clip and config.clip[0] == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(seed), steps, lanes, groups=groups)
    trace, lanes = (trace, lanes) if lanes > 1 else (lockstep.scalar(trace, 0), 0)
    lockstep.steps_equal(config, [trace], against, groups=groups, lanes=lanes)


@settings(max_examples=12, **BOUNDED)
@any_policy
def test_torch_with_lanes(config, seed):
    compared(config, seed, 50, 30, ("torch",))


@settings(max_examples=12, **BOUNDED)
@any_policy
def test_the_host_with_scalars(config, seed):
    compared(config, seed, 100, 1, ("recorded",))


@settings(max_examples=2, **BOUNDED)
@any_policy
def test_jax_with_scalars(config, seed):
    """Few: each policy is a program of its own to compile. Those above have all parts."""
    compared(config, seed, 100, 30, ("jax-scalars",))


@pytest.mark.stress
@settings(max_examples=60, **BOUNDED)
@any_policy
def test_more_random_policies(config, seed):
    compared(config, seed, 200, 100, ("jax-scalars", "jax", "torch"))
    compared(config, seed, 200, 1, ("recorded",))
