"""The host's reports: expected changes, externally skipped steps, rollbacks; and the modes."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.engine import Engine
from healcore.core.tree import map_leaves
from healcore.core.verdict import Action, Cause
from tests.core import fuzz, policies
from tests.core.engine_runner import Runner, same

CONFIG = policies.full("zclip")


@pytest.mark.parametrize("way", ["signal", "method"])
def test_an_announced_jump_is_no_alarm(way):
    rng = np.random.default_rng(0)
    steps = {"loss": 2 + 0.1 * rng.normal(size=100), "grad_norm": 0.1 + 0.01 * rng.random(100)}
    jump = {"loss": 9 + 0.1 * rng.normal(size=60), "grad_norm": 30 + rng.random(60)}
    uninformed, informed = Runner(CONFIG), Runner(CONFIG)
    uninformed.feed(**steps)
    informed.feed(**steps)
    assert any(d.cause for d in uninformed.feed(**jump))
    if way == "method":
        informed.state = informed.engine.expect_change(informed.state, xp=np)
        flags = np.zeros(60, bool)
    else:
        flags = np.arange(60) == 0
    assert not any(
        d.cause & ~int(Cause.PLATEAU) for d in informed.feed(**jump, change_expected=flags)
    )


def test_an_externally_skipped_step_changes_nothing_at_all():
    trace = fuzz.signals(np.random.default_rng(3), 120, 20)
    trace = trace._replace(externally_skipped=np.zeros_like(trace.externally_skipped))
    engine = Engine(CONFIG)
    state = engine.init(batch=(20,))
    for i in range(120):
        garbage = fuzz.at(trace, (i * 7) % 120)._replace(externally_skipped=np.ones(20, bool))
        after, decision = engine.step(state, garbage, xp=np)
        assert same(after, state)
        assert not any(each.any() for each in (decision.skip, decision.action, decision.cause))
        assert (decision.grad_scale == 1).all()
        assert np.array_equal(decision.lr_scale, state.lr.scale)
        state, _ = engine.step(state, fuzz.at(trace, i), xp=np)


def test_observe_judges_as_heal_does_and_enforces_nothing():
    trace = fuzz.signals(np.random.default_rng(4), 200, 20)
    heal, observe = Engine(CONFIG), Engine(CONFIG._replace(mode="observe"))
    a, b = heal.init(batch=(20,)), observe.init(batch=(20,))
    for i in range(200):
        a, ordered = heal.step(a, fuzz.at(trace, i), xp=np)
        b, enforced = observe.step(b, fuzz.at(trace, i), xp=np)
        # A host would carry out the rollbacks of the first, and nobody does those of the second.
        due = (ordered.action & int(Action.ROLLBACK)) != 0
        left = a.budget.recoveries - due.astype(np.int32)
        a = a._replace(budget=a.budget._replace(recoveries=left))
        assert same(a, b)
        assert np.array_equal(ordered.cause, enforced.cause)
        assert (enforced.grad_scale == 1).all()
        assert (enforced.lr_scale == 1).all()
        flags = (enforced.skip, enforced.action, enforced.rollback_depth)
        assert not any(flag.any() for flag in flags)


def test_a_rollback_keeps_budgets_and_the_cut_and_takes_the_detectors_back():
    trace = fuzz.signals(np.random.default_rng(5), 200, 30)
    engine = Engine(CONFIG)
    state = engine.init(batch=(30,))
    for i in range(120):
        state, _ = engine.step(state, fuzz.at(trace, i), xp=np)
        if i == 60:
            restored = state
    back = engine.on_rollback(state, restored, xp=np)
    for part in ("clip", "detectors", "rules", "step", "grace"):
        assert same(getattr(back, part), getattr(restored, part))
    lower = (restored.lr.broken > 0) & (restored.lr.broken < state.lr.broken)
    assert 0 < lower.sum() < len(lower)
    limit = {
        name: np.where(lower, getattr(restored.lr, name), getattr(state.lr, name))
        for name in ("broken", "low")
    }
    assert same(back.lr, state.lr._replace(**limit)), "the cut, or the lower limit of then"
    left = np.maximum(state.budget.recoveries - 1, 0)
    assert state.budget.healthy.any()
    none = np.zeros_like(state.budget.healthy)  # healthy steps count from the rollback on
    assert same(back.budget, state.budget._replace(recoveries=left, healthy=none))
    assert not state.tally.rollbacks.any(), "a step orders rollbacks, it does not carry them out"
    counted = state.tally._replace(rollbacks=state.tally.rollbacks + 1)
    assert same(back.tally, counted)
    assert not back.incident.open.any()
    assert np.array_equal(back.incident.number, state.incident.number)
    assert same(map_leaves(np.shape, back), map_leaves(np.shape, state))
