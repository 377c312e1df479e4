"""Rules on no package index against their formulas, and the fixed clip against torch and optax."""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch

from healcore.core.decision import Cause
from healcore.policy import load
from tests.catalogue import curves
from tests.catalogue.skip import published

pytestmark = pytest.mark.slow  # each policy is replayed beside its original


def equal_wherever_the_windows_are(recipe, original):
    """Checks that the decisions are equal where no outlier entered within the last 128 steps.

    Elsewhere the original's window has the outlier in it, so that it judges by a larger deviation:
    the port finds whatever the original finds, and some steps more.
    """
    compared = skipped = more = 0
    for run, ours in curves.on(curves.synthetic(), recipe):
        theirs = original(run.loss, run.norm)
        alarm = ours.cause != 0
        before = np.cumsum(np.concatenate([[0], alarm]))
        at = np.arange(len(alarm))
        same = before[at] == before[np.maximum(0, at - 128)]
        np.testing.assert_array_equal(theirs[same], ours.skip[same], err_msg=run.name)
        assert not (theirs & ~alarm).any(), run.name
        compared, skipped = compared + int(same.sum()), skipped + int(theirs[same].sum())
        more += int((alarm & ~theirs).sum())
    assert (compared > 3000, skipped >= 10, more > 0) == (True, True, True)


@pytest.mark.parametrize(
    ("recipe", "original"),
    [("levanter-skip", published.levanter), ("maxtext-skip", published.maxtext)],
)
def test_equal_wherever_the_windows_are(recipe, original):
    """Levanter's SkipStepConfig, and MaxText's skip_step_on_spikes with norms before clipping."""
    equal_wherever_the_windows_are(recipe, original)


MEGATRON = functools.partial(published.megatron_skips, threshold=100.0)


@pytest.mark.parametrize(
    ("policy", "original", "fewest"),
    [
        (load("axlearn-skip"), published.axlearn, 5),
        (load("megatron-threshold"), MEGATRON, 5),
    ],
    ids=["AXLearn", "Megatron"],
)
def test_the_same_norms_are_skipped(policy, original, fewest):
    """AXLearn: equal where the first norm is below 20 and no level shifts for good."""
    skipped = 0
    for run, ours in curves.on(curves.synthetic(), policy):
        theirs = original(run.norm)
        np.testing.assert_array_equal(theirs, ours.skip, err_msg=run.name)
        skipped += int(theirs.sum())
    assert skipped >= fewest


def test_megatron_finds_the_same_losses_unexpectedly_large():
    run = curves.healthy()
    run.loss[[50, 200, 300]] *= 40
    for losses in (run.loss, np.where(np.arange(len(run.loss)) == 50, 2.0, run.loss)):
        ours = curves.decisions_of("megatron-threshold", losses, run.norm)
        theirs = published.megatron_spiky(losses)
        np.testing.assert_array_equal(theirs, ours.reports(Cause.DIVERGENCE))
        assert not ours.skip.any(), "it only alerts"
    assert theirs.any()


def test_a_fixed_clip_has_the_factors_of_torch_and_optax():
    clip = optax.clip_by_global_norm(1.0)
    for run, ours in curves.on(curves.synthetic(), "fixed-clip"):
        factors = []
        for norm in run.norm:
            weight = torch.nn.Parameter(torch.ones(1))
            weight.grad = torch.full((1,), float(norm))
            torch.nn.utils.clip_grad_norm_([weight], 1.0)
            factors.append(float(weight.grad) / float(norm))
        np.testing.assert_allclose(ours.grad_scale, factors, rtol=1e-6, err_msg=run.name)
        for i in range(0, len(run.norm), 100):
            gradient = {"w": jnp.asarray(run.norm[i : i + 1])}
            clipped: Any = clip.update(gradient, clip.init(gradient))[0]
            got = float(clipped["w"][0]) / float(run.norm[i])
            np.testing.assert_allclose(ours.grad_scale[i], got, rtol=2e-6)
