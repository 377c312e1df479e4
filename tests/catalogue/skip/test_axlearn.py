"""axlearn-skip against the formula of AXLearn's skip_and_clip_by_global_norm (on no index).

Equal step by step where the first norm is below 20 and no level shifts for good.
"""

from __future__ import annotations

import numpy as np

from healcore.policy import Policy, load
from tests.catalogue.skip import published, traces

RECIPE = "axlearn-skip"


def with_sigmas(sigmas: float, warmup_steps: int) -> Policy:
    """`drop_norm_by_grad_norm_stddev` in place of `drop_norm_by_grad_norm_ema`."""
    change = {"ratio": None, "sigmas": sigmas, "warmup_steps": warmup_steps}
    return load(RECIPE, detect={"grad_ema": change})


def test_the_same_steps_are_dropped():
    runs, dropped = traces.everything(), 0
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        theirs = published.axlearn(run.norm)
        np.testing.assert_array_equal(theirs, ours.skip, err_msg=run.name)
        dropped += int(theirs.sum())
    assert dropped >= 5


def test_the_same_steps_with_standard_deviations():
    """From step 100 on: 500 is longer than the runs. Unlike a shift, a spike leaves no trace."""
    runs = [run for run in traces.synthetic() if "shift" not in run.name]
    dropped = 0
    for run, ours in zip(runs, traces.port(with_sigmas(6.0, 100), runs), strict=True):
        theirs = published.axlearn(run.norm, ratio=None, sigmas=6.0, min_count=100)
        np.testing.assert_array_equal(theirs, ours.skip, err_msg=run.name)
        dropped += int(theirs.sum())
    assert dropped >= 10
