"""The core decides as the reference does, under random policies."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import fuzz, oracle, policies
from tests.core.random_policies import BOUNDED, engine_configs

LANES, STEPS = 6, 150


@settings(max_examples=60, **BOUNDED)
@given(config=engine_configs(), seed=st.integers(0, 1 << 20), wild=st.booleans())
def test_the_core_decides_as_the_reference_does(config, seed, wild):
    groups = policies.GROUPS if config.clip and config.clip[0] == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(seed), STEPS, LANES, groups=groups, wild=wild)
    outcome = oracle.agree(oracle.known_to_reference(config), trace, groups=groups)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.ties <= LANES // 2
