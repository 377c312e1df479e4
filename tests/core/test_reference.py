"""The core decides as the plain-Python reference does, step by step, on fuzzed traces."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.core.signals import Signals
from tests.core import fuzz, oracle, policies
from tests.core.random_policies import BOUNDED, engine_configs

STEPS, LANES = 300, 12
some_lanes = pytest.mark.parametrize("lanes", [LANES, pytest.param(30, marks=pytest.mark.stress)])
plain_and_wild = pytest.mark.parametrize("wild", [False, True], ids=["plain", "wild"])


def check(config, trace, *, groups=0):
    """Both decide alike, but for a tenth of the steps after decisions too close to call."""
    steps, lanes = oracle.lanes_of(trace)
    outcome = oracle.agree(oracle.known_to_reference(config), trace, groups=groups)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.ties <= lanes // 10
    assert outcome.steps >= 0.9 * steps * lanes


@plain_and_wild
@pytest.mark.parametrize("clip", policies.CLIPS)
@pytest.mark.parametrize(
    ("policy", "lanes"),
    [(policies.covering, LANES), pytest.param(policies.full, 30, marks=pytest.mark.stress)],
    ids=["some", "all"],
)
def test_every_clipping_rule_with_every_detector_and_rule(policy, lanes, clip, wild):
    groups = policies.GROUPS if clip == "adagc" else 0
    rng = np.random.default_rng(len(clip) + 100 * wild)
    trace = fuzz.signals(rng, STEPS, lanes, groups=groups, wild=wild)
    check(policy(clip), trace, groups=groups)


@plain_and_wild
@pytest.mark.parametrize("which", policies.PUBLISHED)
@some_lanes
def test_the_detectors_of_the_catalogue(lanes, which, wild):
    config = oracle.known_to_reference(policies.published(which))
    assert len(config.detectors) == 1 + len(policies.PUBLISHED[which])
    check(config, fuzz.signals(np.random.default_rng(40 + wild), STEPS, lanes, wild=wild))


@plain_and_wild
@some_lanes
@pytest.mark.parametrize("detector", ["instability", "records"])
def test_a_detector_of_growth_alone(lanes, wild, detector):
    trace = fuzz.signals(np.random.default_rng(50 + wild), STEPS, lanes, wild=wild)
    check(policies.growing(detector), trace)


@pytest.mark.parametrize("present", ["loss", "grad_norm", "loss grad_norm", "grad_norm eval_loss"])
def test_a_detector_without_its_signal_rests(present):
    trace = fuzz.signals(np.random.default_rng(5), STEPS, LANES)
    check(policies.full("zclip"), Signals(**{k: getattr(trace, k) for k in present.split()}))


def test_the_traces_reach_everything():
    """The traces provoke every kind of decision, otherwise the oracle would prove little."""
    trace = fuzz.signals(np.random.default_rng(105), STEPS, 30)
    got = oracle.core_run(policies.full("zclip"), trace)
    assert np.bitwise_or.reduce(got["cause"], axis=None) == 2047  # all eleven causes
    assert np.bitwise_or.reduce(got["action"], axis=None) == 31  # all five actions
    assert got["skip"].any()
    assert got["rollback_depth"].max() >= 3
    got = oracle.core_run(policies.full("zclip"), trace._replace(learning_rate=None))
    assert got["lr_scale"].min() == np.float32(0.2)
    assert ((got["grad_scale"] > 0) & (got["grad_scale"] < 1)).any()


FEW_LANES, FEW_STEPS = 6, 150


any_run = given(config=engine_configs(), seed=st.integers(0, 1 << 20), wild=st.booleans())


@settings(max_examples=15, **BOUNDED)
@any_run
def test_random_policies(config, seed, wild):
    decides_as_the_reference(config, seed, wild)


@pytest.mark.stress
@settings(max_examples=300, **BOUNDED)
@any_run
def test_more_random_policies(config, seed, wild):
    decides_as_the_reference(config, seed, wild)


def decides_as_the_reference(config, seed, wild):
    groups = policies.GROUPS if config.clip and config.clip[0] == "adagc" else 0
    trace = fuzz.signals(
        np.random.default_rng(seed), FEW_STEPS, FEW_LANES, groups=groups, wild=wild
    )
    outcome = oracle.agree(oracle.known_to_reference(config), trace, groups=groups)
    assert outcome.wrong is None, outcome.wrong
    assert outcome.ties <= FEW_LANES // 2
