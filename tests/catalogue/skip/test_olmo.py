"""olmo2-skip-step against OLMo-core's own optimizer, step by step.

The two windows hold the same values wherever no outlier entered within the last 128 steps: there
the decisions are equal. Elsewhere the original's window has the outlier in it, so that it judges
by a larger deviation: the port finds whatever the original finds, and some steps more. It skips
all of them but for the rest of a row of more than ten (`max_skips`).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.catalogue.skip import traces

optim = pytest.importorskip("olmo_core.optim", exc_type=ImportError)

RECIPE = "olmo2-skip-step"
WINDOW = 128


def original(run: traces.Trace) -> np.ndarray:
    """The steps that SkipStepAdamW over one weight skips."""
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer, skips = optim.SkipStepAdamW([weight], lr=1e-3), []
    for loss, norm in zip(run.loss.tolist(), run.norm.tolist(), strict=True):
        optimizer.latest_loss = torch.tensor(loss)
        optimizer.latest_grad_norm = torch.tensor(norm)
        weight.grad = torch.full((1,), norm)
        optimizer.step()
        skips.append(bool(optimizer.step_skipped))
    return np.array(skips)


def test_equal_wherever_the_windows_are_and_elsewhere_the_port_finds_more():
    runs, compared, skipped, more = traces.everything(), 0, 0, 0
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        theirs = original(run)
        same = traces.after_none(ours.alarm, WINDOW)
        np.testing.assert_array_equal(theirs[same], ours.skip[same], err_msg=run.name)
        compared, skipped = compared + int(same.sum()), skipped + int(theirs[same].sum())
        assert not (theirs & ~ours.alarm).any(), run.name
        passed = np.flatnonzero(ours.alarm & ~ours.skip)
        assert all(ours.alarm[i - 10 : i].all() for i in passed), "only after ten in a row"
        more += int((ours.alarm & ~theirs).sum())
    assert compared > 3000
    assert skipped >= 10
    assert more > 0
