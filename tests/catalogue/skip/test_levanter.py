"""levanter-skip against the formula of Levanter's SkipStepConfig (not on a package index)."""

from __future__ import annotations

import numpy as np

from tests.catalogue.skip import published, traces

RECIPE = "levanter-skip"


def test_equal_wherever_the_windows_are():
    runs, compared, skipped = traces.everything(), 0, 0
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        theirs = published.levanter(run.loss, run.norm)
        same = traces.after_none(ours.alarm, 128)
        np.testing.assert_array_equal(theirs[same], ours.skip[same], err_msg=run.name)
        assert not (theirs & ~ours.alarm).any(), run.name
        compared, skipped = compared + int(same.sum()), skipped + int(theirs[same].sum())
    assert compared > 3000
    assert skipped >= 10
