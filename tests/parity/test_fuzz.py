"""NumPy, JAX jit + scan and torch eager, bit for bit, on fuzzed steps: millions under `stress`.

JAX runs lane after lane on 0-d arrays, as in a training step, and for one policy also all lanes
at once, as in a sweep: XLA compiles the two differently. The lanes of the catalogue's detectors are
in test_vmapped_policies.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.core import fuzz, policies
from tests.parity import lockstep

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
