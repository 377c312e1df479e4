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


def test_it_judges_one_step_later_than_olmo_s_rule():
    run = traces.healthy(0, 100)
    run.loss[63] = 50.0
    (late,), (early,) = traces.port(RECIPE, [run]), traces.port("olmo2-skip-step", [run])
    assert not late.skip[63]
    assert early.skip[63]


def test_one_nan_costs_the_original_129_steps():
    run = traces.healthy(3, 400)
    run.norm[200] = np.inf
    (ours,) = traces.port(RECIPE, [run])
    with np.errstate(invalid="ignore"):
        theirs = published.levanter(run.loss, run.norm)
    assert np.flatnonzero(theirs).tolist() == list(range(200, 329))
    assert np.flatnonzero(ours.skip).tolist() == [200]


def test_the_floor_of_the_deviation_has_the_unit_of_the_value():
    """Losses of a size of 1e-7 never rise 6e-6, whatever happens to them."""
    run = traces.healthy(3, 200)
    run.loss[:] = 1e-7 * run.loss
    run.loss[150] *= 20
    (ours,) = traces.port(RECIPE, [run])
    assert not published.levanter(run.loss, run.norm).any()
    assert np.flatnonzero(ours.skip).tolist() == [150]
