"""NumPy, JAX jit + scan and torch eager, bit for bit, on more than a million fuzzed steps.

JAX runs lane after lane on 0-d arrays, as in a training step, and for two policies also all lanes
at once, as in a sweep: XLA compiles the two differently.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.core import fuzz, policies
from tests.parity import lockstep

# (steps, lanes): a histogram of a thousand bins per lane is the one thing here that is slow.
SIZES = dict.fromkeys(policies.CLIPS, (400, 550)) | {"autoclip": (300, 80)}


@pytest.mark.parametrize("clip", policies.CLIPS)
def test_the_same_bits_in_numpy_jax_and_torch(clip):
    steps, lanes = SIZES[clip]
    groups = policies.GROUPS if clip == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(len(clip)), steps, lanes, groups=groups)
    against = ("jax-scalars", "torch", *(["jax"] if clip in ("zclip", "adagc") else []))
    compared = lockstep.steps_equal(
        policies.covering(clip), [trace], against, groups=groups, lanes=lanes
    )
    assert compared == steps * lanes


@pytest.mark.parametrize("which", policies.PUBLISHED)
def test_the_detectors_of_the_catalogue_too(which):
    trace = fuzz.signals(np.random.default_rng(60), 300, 150)
    lockstep.steps_equal(
        policies.published(which), [trace], ("jax-scalars", "jax", "torch"), lanes=150
    )


def test_that_is_more_than_a_million():
    assert sum(steps * lanes for steps, lanes in SIZES.values()) >= 1_000_000


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
