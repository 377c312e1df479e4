"""llmc-soft-step against the formula of llm.c's outlier detector (C, on no package index)."""

from __future__ import annotations

import numpy as np

from healcore.core.signals import Signals
from healcore.policy import load
from tests.catalogue.skip import published, traces

RECIPE = "llmc-soft-step"


def test_it_finds_all_that_the_original_finds_wherever_the_windows_are_equal():
    found, runs = 0, traces.everything()
    for run, ours in zip(runs, traces.port(RECIPE, runs), strict=True):
        theirs = published.llmc(run.norm)
        same = traces.after_none(ours.alarm | theirs, 128)
        assert not (theirs & ~ours.alarm)[same].any(), run.name
        found += int(theirs[same].sum())
    assert found >= 5


def test_where_the_windows_are_equal_eight_there_is_eleven_here():
    """The original's window has the outlier in it: z 8 of 128 is 11.4 of the other 127."""
    run = traces.healthy(0, 160)
    run.norm[:150] = 1 + 0.01 * np.random.default_rng(0).normal(size=150)
    mean, std = run.norm[22:150].mean(), run.norm[22:150].std()
    for sigmas, theirs, ours in ((7.0, False, False), (10.0, False, True), (13.0, True, True)):
        run.norm[150] = mean + sigmas * std
        (decisions,) = traces.port(RECIPE, [run])
        assert (published.llmc(run.norm)[150], decisions.alarm[150]) == (theirs, ours)


def test_a_nan_disables_the_original_and_is_skipped_here():
    run = traces.healthy(3, 400)
    run.norm[200], run.norm[300] = np.nan, 1000.0
    assert not published.llmc(run.norm).any()
    (ours,) = traces.port(RECIPE, [run])
    assert np.flatnonzero(ours.skip).tolist() == [200]
    assert ours.alarm[300]


def test_the_step_is_a_tenth_and_only_that_one():
    run = traces.healthy(4, 200)
    run.norm[150] = 100.0
    engine = load(RECIPE).engine()
    state, scales = engine.init(), []
    for loss, norm in zip(run.loss, run.norm, strict=True):
        state, decision = engine.step(state, Signals(loss=loss, grad_norm=norm), xp=np)
        scales.append(float(decision.lr_scale))
    assert scales == [1.0] * 150 + [float(np.float32(0.1))] + [1.0] * 49
