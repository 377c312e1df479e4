"""The policies that come with healcore."""

from __future__ import annotations

import tomllib

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause
from healcore.policy import diff, load, preset_names, preset_text
from tests.catalogue.watch.curves import decisions_of, first
from tests.core.engine_runner import Runner


def healthy(steps):
    """A healthy run: falling loss, norms with a scatter of ten per cent, below every limit."""
    rng = np.random.default_rng(0)
    losses = 2 + 3 * np.exp(-np.arange(steps) / 100) + 0.02 * rng.standard_normal(steps)
    return losses, 0.5 * np.exp(0.1 * rng.standard_normal(steps))


@pytest.mark.parametrize("name", preset_names())
def test_each_has_a_name_a_description_and_references(name):
    policy = load(name)
    assert policy.name == name
    assert policy.description.endswith(".")
    assert policy.references
    written = tomllib.loads(preset_text(name))
    assert "shift" not in written.get("clip", {}), "the escape has the core's defaults"


@pytest.mark.parametrize("name", preset_names())
def test_a_healthy_run_is_left_alone(name):
    decisions = decisions_of(name, *healthy(600))
    assert not decisions.skip.any()
    assert not decisions.action.any()
    assert (decisions.lr_scale == 1).all()


def test_nans_that_go_on_are_a_rollback_and_a_cut():
    losses, norms = healthy(400)
    losses[200:220] = np.nan
    begins = []
    for name in ("aggressive", "pretraining", "conservative"):
        decisions = decisions_of(name, losses, norms)
        assert decisions.orders(Action.ROLLBACK).sum() == 1
        assert decisions.orders(Action.CUT_LR).sum() == 1
        begins.append(first(decisions.orders(Action.ROLLBACK)))
    assert begins == sorted(set(begins)), "aggressive acts first, conservative last"


# -- what default does with finite numbers, and pretraining ---------------------------------------


def test_default_skips_no_finite_batch_and_pretraining_does():
    """Single losses and norms far above the level."""
    losses, norms = healthy(300)
    losses[150:280:13] += 5.0
    norms[150:280:13] *= 50.0
    assert not decisions_of("default", losses, norms).skip.any()
    assert decisions_of("pretraining", losses, norms).skip.sum() >= 8


def test_default_only_says_that_data_may_be_other_and_pretraining_acts():
    """Loss and norm quadruple and slowly fall. `default` confirms before it rolls back."""
    assert load("default").rollback.confirm
    assert not load("pretraining").rollback.confirm
    losses, norms = healthy(400)
    high = np.exp(-np.arange(200) / 300)
    losses[200:] += 6.0 * high
    norms[200:] *= 1 + 3 * high
    default, acting = (decisions_of(name, losses, norms) for name in ("default", "pretraining"))
    assert not default.orders(Action.CUT_LR | Action.STOP).any()
    assert default.orders(Action.ALERT).any()
    assert acting.orders(Action.CUT_LR).any()
    assert acting.orders(Action.ROLLBACK).any()
    assert not acting.orders(Action.STOP).any()


def test_default_warns_of_a_loss_that_blows_up_and_changes_no_finite_step():
    """Each step makes the next worse. The host decides about the rate."""
    losses, norms = healthy(220)
    grown = 1.5 ** np.arange(20)
    losses[200:] += grown
    norms[200:] *= 1 + 10 * grown
    decisions = decisions_of("default", losses, norms)
    at = first(decisions.reports(Cause.LOSS_SPIKE))
    assert at is not None
    assert at >= 200
    assert decisions.action[at] == Action.ALERT
    assert (decisions.lr_scale == 1).all()
    assert (decisions.grad_scale == 1).all()
    assert not decisions.skip.any()
    assert not load("default").engine().cuts_lr
    assert load("default").engine().limits_lr


def test_observe_is_default_in_another_mode():
    differing = {d.key for d in diff(load("default"), load("observe"))}
    assert differing == {"name", "description", "references", "mode"}
    losses, norms = healthy(100)
    norms[50] = np.inf
    for decision in Runner(load("observe").config()).feed(loss=losses, grad_norm=norms):
        assert not decision.skip
        assert (decision.grad_scale, decision.lr_scale, decision.action) == (1, 1, 0)
