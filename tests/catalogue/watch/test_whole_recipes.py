"""PaLM's, OPT's and KempnerForge's recipes do what their sources describe.

Two of them were carried out by people, so there is no program to drive: what is held here is which
orders come, when, and with what behind them. The third is a wish list, taken item by item.
"""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.signals import Signals
from healcore.core.verdict import Action
from healcore.policy import load
from tests.catalogue.watch import curves


def spiked(steps=600, at=400, length=15, height=1.5):
    """A healthy run with one sustained spike, and quiet norms."""
    losses = curves.healthy(steps, seed=4)
    losses[at : at + length] += height
    return losses, np.full(steps, 0.2, np.float32)


# -- PaLM -----------------------------------------------------------------------------------------


def test_palm_goes_back_once_for_a_spike_and_touches_nothing_else():
    decisions = curves.decisions_of("palm-rollback", *spiked())
    (order,) = np.flatnonzero(decisions.orders(Action.ROLLBACK))
    assert 400 <= order <= 410
    assert not decisions.orders(Action.CUT_LR).any()
    assert (decisions.lr_scale == 1).all()
    assert not decisions.skip.any()


# -- OPT ------------------------------------------------------------------------------------------


def test_opt_the_cut_survives_the_restored_optimizer():
    """In OPT's logbook, reloading the optimizer overwrote the settings made for the restart."""
    engine = load("opt-restart").engine()
    losses, norms = spiked(at=400)
    state = saved = engine.init()
    for i, (loss, norm) in enumerate(zip(losses, norms, strict=True)):
        state, decision = engine.step(state, Signals(loss=loss, grad_norm=norm), xp=np)
        saved = state if i == 300 else saved
        if decision.action & int(Action.ROLLBACK):
            break
    assert saved.lr.scale == 1
    back = engine.on_rollback(state, saved, xp=np)
    _, decision = engine.step(back, Signals(loss=losses[301], grad_norm=norms[301]), xp=np)
    assert decision.lr_scale == np.float32(0.67)


# -- KempnerForge, issue 2 ------------------------------------------------------------------------


@pytest.fixture
def kempner():
    return load("kempnerforge")


def nans(where, steps=400):
    losses, norms = spiked(steps=steps, at=steps)
    norms[where] = np.nan
    return losses, norms


def test_kempner_skips_nan_and_goes_back_at_the_tenth_in_a_row(kempner):
    decisions = curves.decisions_of(kempner, *nans(slice(100, 112)))
    assert decisions.skip[100:112].all()
    assert np.flatnonzero(decisions.orders(Action.ROLLBACK)).tolist() == [109]
    assert np.flatnonzero(decisions.orders(Action.CUT_LR)).tolist() == [109]


def test_kempner_gradient_anomalies_are_seen_in_the_step(kempner):
    losses, norms = spiked(at=600)
    norms *= np.exp(0.05 * np.random.default_rng(0).standard_normal(len(norms))).astype(np.float32)
    norms[300] = 5.0
    decisions = curves.decisions_of(kempner, losses, norms)
    assert np.flatnonzero(decisions.skip).tolist() == [300]
    assert not decisions.orders(Action.ROLLBACK).any()


def test_kempner_retries_are_bounded_and_the_last_one_stops(kempner):
    assert kempner.budget.recoveries == 3
    decisions = curves.decisions_of(kempner, *nans(slice(100, 1000), steps=1000))
    assert decisions.orders(Action.ROLLBACK).sum() == 3
    stop = curves.first(decisions.orders(Action.STOP))
    assert stop is not None
    assert stop > np.flatnonzero(decisions.orders(Action.ROLLBACK))[-1]
