"""The core decides as the reference does, under random policies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.core import fuzz, oracle, policies
from tests.core.random_policies import BOUNDED, engine_configs

LANES, STEPS = 6, 150


any_run = given(config=engine_configs(), seed=st.integers(0, 1 << 20), wild=st.booleans())


@settings(max_examples=15, **BOUNDED)
@any_run
def test_the_core_decides_as_the_reference_does(config, seed, wild):
    decides_as_the_reference(config, seed, wild)


@pytest.mark.stress
@settings(max_examples=300, **BOUNDED)
@any_run
def test_more_policies(config, seed, wild):
    decides_as_the_reference(config, seed, wild)


def decides_as_the_reference(config, seed, wild):
    groups = policies.GROUPS if config.clip and config.clip[0] == "adagc" else 0
    trace = fuzz.signals(np.random.default_rng(seed), STEPS, LANES, groups=groups, wild=wild)
    outcome = oracle.agree(oracle.known_to_reference(config), trace, groups=groups)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.ties <= LANES // 2
