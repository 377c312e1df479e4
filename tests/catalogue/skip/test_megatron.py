"""megatron-threshold against the formulas of Megatron-LM (its optimizer needs a GPU cluster)."""

from __future__ import annotations

import numpy as np

from healcore.core.verdict import Cause
from tests.catalogue.skip import published, traces
from tests.catalogue.watch.curves import decisions_of

RECIPE = "megatron-threshold"


def test_the_same_norms_are_above_the_threshold():
    runs, skipped = traces.everything(), 0
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        theirs = published.megatron_skips(run.norm, 100.0)
        np.testing.assert_array_equal(theirs, ours.skip, err_msg=run.name)
        skipped += int(theirs.sum())
    assert skipped >= 5


def test_the_same_losses_are_unexpectedly_large():
    run = traces.healthy(0)
    run.loss[[50, 200, 300]] *= 40
    for losses in (run.loss, np.where(np.arange(len(run.loss)) == 50, 2.0, run.loss)):
        ours = decisions_of(RECIPE, losses, run.norm)
        theirs = published.megatron_spiky(losses)
        np.testing.assert_array_equal(theirs, ours.reports(Cause.DIVERGENCE))
        assert not ours.skip.any(), "it only alerts"
    assert theirs.any()
