"""Rules, incidents, budgets and the multiplier of the rate. Limits of the rate are in `oracle`."""

import numpy as np
import pytest

from healcore.core.decision import Action, Cause
from healcore.core.engine import (
    BudgetConfig,
    Engine,
    IncidentConfig,
    LrConfig,
    RollbackConfig,
    RuleConfig,
)
from healcore.core.trees import map_leaves
from tests.core import fuzz, policies
from tests.core.engine_runner import Runner, flags, same, watching

NOT_FINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
ROLLBACK = int(Action.ROLLBACK)


def where(decisions, action: Action) -> list[int]:
    return np.flatnonzero(flags(decisions, action)).tolist()


def fired(rule: RuleConfig, losses, action: Action = Action.ROLLBACK) -> list[int]:
    """The steps at which a rule on losses that are not finite orders `action`."""
    return where(Runner(watching("nonfinite", rule)).feed(loss=losses), action)


def bad(steps: int, *at: int) -> np.ndarray:
    losses = np.ones(steps)
    losses[list(at)] = np.nan
    return losses


def test_a_loss_that_is_no_number_is_skipped_where_a_rule_orders_it():
    skipping = watching("nonfinite", RuleConfig(NOT_FINITE, skip=True))
    for config, skips in ((watching("nonfinite"), False), (skipping, True)):
        decision = Runner(config).step(loss=np.nan, grad_norm=1.0)
        assert decision.skip == skips
        assert decision.cause == Cause.NONFINITE_LOSS


def test_a_rule_fires_after_hits_in_a_row_or_within_a_window():
    rule = RuleConfig(NOT_FINITE, action=ROLLBACK, consecutive=3)
    assert fired(rule, bad(9, 1, 2, 4, 5, 6, 7)) == [6]
    # KempnerForge's detector, which counts consecutive steps, misses this for 199 steps.
    every_other = bad(200, *range(1, 200, 2))
    assert not fired(rule, every_other)
    rate = RuleConfig(NOT_FINITE, action=ROLLBACK, count=5, within=20)
    assert fired(rate, every_other)[0] == 9, "at the fifth NaN"


def test_a_stop_rule_stops():
    rule = RuleConfig(NOT_FINITE, action=int(Action.STOP), consecutive=4)
    assert fired(rule, bad(20, 5, 6, 7, 8), Action.STOP) == [8]


BAD = int(Cause.NONFINITE_LOSS)
ESCALATION = watching(
    "nonfinite", RuleConfig(BAD, action=int(Action.ROLLBACK | Action.CUT_LR))
)._replace(
    incident=IncidentConfig(quiet_steps=5, patience=10),
    rollback=RollbackConfig(depth=1, deepen=2, region=50),
    budget=BudgetConfig(recoveries=3, lr_cuts=2, refund_after=1 << 20),
)


@pytest.mark.parametrize(
    ("at", "depths", "cuts"),
    [
        pytest.param((10, 14), {10: 1}, [10], id="one incident"),
        pytest.param((10, 16, 22), {10: 1, 16: 3, 22: 5}, [10, 16], id="three incidents"),
        pytest.param(
            (10, 40, 80, 150), {10: 1, 40: 3, 80: 5, 150: 1}, [10, 40], id="another region"
        ),
        pytest.param(
            range(20, 45), {20: 1, 31: 3, 42: 5}, [20, 31], id="alarms that continue after patience"
        ),
    ],
)
def test_cuts_have_a_budget_of_their_own(at, depths, cuts):
    """Rollbacks that are ordered and not carried out cost nothing, and go deeper in one region."""
    runner = Runner(ESCALATION)
    decisions = runner.feed(loss=bad(200, *at))
    found = {i: int(d.rollback_depth) for i, d in enumerate(decisions) if d.rollback_depth}
    assert found == depths
    assert where(decisions, Action.CUT_LR) == cuts
    assert runner.state.budget.recoveries == 3


CUTS = watching("nonfinite", RuleConfig(BAD, action=int(Action.CUT_LR)))._replace(
    incident=IncidentConfig(quiet_steps=3, patience=1),
    lr=LrConfig(factor=0.5, floor=0.2, hold_steps=4, ramp_steps=5),
    budget=BudgetConfig(lr_cuts=100),
)


def scales(steps: int, config) -> np.ndarray:
    """Multipliers of a run whose rate is cut at step 2."""
    return np.array([d.lr_scale for d in Runner(config).feed(loss=bad(steps, 2))])


def test_a_cut_rate_is_held_and_then_ramps_up_to_one():
    # Cut at 2; open until 4 (three quiet steps); held for four; then five steps up.
    expected = [1, 1, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 0.6, 0.7, 0.8, 0.9, 1, 1]
    np.testing.assert_allclose(scales(15, CUTS), expected, rtol=1e-6)


@pytest.mark.parametrize("top", [0.0, 0.5])
@pytest.mark.parametrize("ramp_steps", [1, 2, 7, 97, 1000])
def test_the_ramp_rises_and_ends_at_exactly_one_or_the_ceiling(ramp_steps, top):
    lr = LrConfig(0.37, 0.1, hold_steps=2, ramp_steps=ramp_steps, ceiling=top)
    budget = BudgetConfig(lr_cuts=100, refund_after=1 << 20)
    got = scales(ramp_steps + 20, CUTS._replace(lr=lr, budget=budget))
    assert got.dtype == np.float32
    assert (np.diff(got[2:]) >= 0).all()
    assert got[2] == np.float32(0.37)
    assert (got[6 + ramp_steps :] == (top or 1)).all()
    assert got[5 + ramp_steps] < (top or 1) or ramp_steps == 1


FULL = policies.full("zclip")


@pytest.mark.slow
def test_observe_judges_as_heal_does_and_enforces_nothing():
    trace = fuzz.signals(np.random.default_rng(4), 200, 20)
    heal, observe = Engine(FULL), Engine(FULL._replace(mode="observe"))
    a, b = heal.init(batch=(20,)), observe.init(batch=(20,))
    for i in range(200):
        a, ordered = heal.step(a, fuzz.at(trace, i))
        b, enforced = observe.step(b, fuzz.at(trace, i))
        # A host would carry out the rollbacks of the first, and nobody the rollbacks of the second.
        due = (ordered.action & int(Action.ROLLBACK)) != 0
        left = a.budget.recoveries - due.astype(np.int32)
        a = a._replace(budget=a.budget._replace(recoveries=left))
        assert same(a, b)
        assert np.array_equal(ordered.cause, enforced.cause)
        assert (enforced.grad_scale == 1).all()
        assert (enforced.lr_scale == 1).all()
        neutral_flags = (enforced.skip, enforced.action, enforced.rollback_depth)
        assert not any(flag.any() for flag in neutral_flags)


def test_a_rollback_keeps_budgets_and_the_cut_and_takes_the_detectors_back():
    trace = fuzz.signals(np.random.default_rng(5), 200, 30)
    engine = Engine(FULL)
    state = engine.init(batch=(30,))
    for i in range(120):
        state, _ = engine.step(state, fuzz.at(trace, i))
        if i == 60:
            restored = state
    back = engine.on_rollback(state, restored)

    # Restored: what the detectors and rules had seen.
    for part in ("clip", "detectors", "rules", "step", "grace"):
        assert same(getattr(back, part), getattr(restored, part))

    # Kept: the cut of the learning rate, unless an earlier one was lower.
    lower = (restored.lr.rate_at_cut > 0) & (restored.lr.rate_at_cut < state.lr.rate_at_cut)
    assert 0 < lower.sum() < len(lower)
    limit = {
        name: np.where(lower, getattr(restored.lr, name), getattr(state.lr, name))
        for name in ("rate_at_cut", "rate_after_cut")
    }
    assert same(back.lr, state.lr._replace(**limit)), "the cut, or the lower limit of then"

    # Counted: the rollback itself.
    left = np.maximum(state.budget.recoveries - 1, 0)
    assert state.budget.healthy_steps.any()
    none = np.zeros_like(state.budget.healthy_steps)  # healthy steps count from the rollback on
    assert same(back.budget, state.budget._replace(recoveries=left, healthy_steps=none))
    assert not state.tally.rollbacks.any(), "a step orders rollbacks, it does not carry them out"
    assert same(back.tally, state.tally._replace(rollbacks=state.tally.rollbacks + 1))

    # Live: the limit of the norm, and the numbers of incidents.
    assert back.norm_limit is state.norm_limit, "the limit of the norm is the live one"
    assert not back.incident.open.any()
    assert np.array_equal(back.incident.number, state.incident.number)
    assert same(map_leaves(np.shape, back), map_leaves(np.shape, state))


def test_a_limited_policy_takes_the_rate_and_scales_updates():
    """Also without a rule: the rollback may come from compared weights."""
    rolls_back = RuleConfig(int(Cause.OVERFIT), action=int(Action.ROLLBACK))
    for rules in ((rolls_back,), ()):
        for ceiling in (0.5, 0.0):
            engine = Engine(FULL._replace(clip=None, rules=rules, lr=LrConfig(ceiling=ceiling)))
            assert engine.limits_lr == engine.scales_lr == (ceiling > 0)


@pytest.mark.parametrize(
    "rule", [RuleConfig(int(Cause.OVERFIT), action=ROLLBACK), RuleConfig(NOT_FINITE, skip=True)]
)
def test_before_a_limit_no_decision_depends_on_the_rate(rule):
    """So torch reads the rate only from the first limit on."""
    trace = fuzz.signals(np.random.default_rng(9), 200, 20)
    budget = BudgetConfig(recoveries=3, lr_cuts=1, refund_after=9)
    lr = LrConfig(factor=0.25, floor=0.01, hold_steps=3, ramp_steps=8, ceiling=0.5)
    engine = Engine(ESCALATION._replace(rules=(rule,), lr=lr, budget=budget))
    a = b = engine.init(batch=(20,))
    last_scales = np.ones(20)
    for i in range(200):
        if i == 90:
            a, b = (engine.on_rollback(each, each) for each in (a, b))
            a, b = (engine.limit_lr(s, np.float32(1e-3), np.float32(1)) for s in (a, b))
        current = engine.specialised_for(b)
        assert current.limits_lr == (i >= 90)
        a, first = engine.step(a, fuzz.at(trace, i))
        b, second = current.step(b, fuzz.at(trace, i))
        assert same(first, second)
        last_scales = first.lr_scale
    assert len(np.unique(last_scales)) > 1


@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("last", [0.0, -0.0, 1e-20, -1e-20])
def test_a_rate_of_zero_is_a_known_rate_and_leaves_the_multiplier_as_it_is(last, cuts):
    """A schedule may end with 0, or begin with it: it has not risen above the limit there."""
    rule = RuleConfig(int(Cause.OVERFIT), action=ROLLBACK | int(Action.CUT_LR) * cuts)
    lr = LrConfig(factor=0.25, hold_steps=3, ramp_steps=8, ceiling=0.25)
    for limit, highest in ((0.5, 1.0), (0.005, 0.5)):
        runner = Runner(ESCALATION._replace(rules=(rule,), lr=lr))
        runner.step(loss=1.0, learning_rate=0.01)
        given = np.float32(limit), np.float32(0.01)
        runner.state = runner.engine.limit_lr(runner.state, *given)
        rates = [0.01, 0.008, 0.006, 0.004, 0.002, 0.001, last, last]
        scales = [each.lr_scale for each in runner.feed(loss=[1.0] * 8, learning_rate=rates)]
        assert scales[0] == pytest.approx(highest)
        assert scales[-1] == scales[-2] == scales[-3]
        scales = [each.lr_scale for each in runner.feed(loss=[1.0] * 2, learning_rate=[1e-4, 0.02])]
        assert scales == pytest.approx([1.0, min(1.0, limit / 0.02)]), "another schedule begins"


def test_a_limit_at_a_rate_of_zero_is_the_limit_of_the_rates_that_follow():
    """A warm-up begins with 0."""
    rule = RuleConfig(int(Cause.OVERFIT), action=ROLLBACK)
    runner = Runner(ESCALATION._replace(rules=(rule,), lr=LrConfig(ceiling=0.25)))
    zero = np.float32(0)
    with np.errstate(all="raise"):
        runner.state = runner.engine.limit_lr(runner.state, np.float32(0.005), zero)
        runner.state = runner.engine.apply_rate(runner.state, zero)
    assert runner.state.lr.scale == 1
    rates = [0.0, 0.0, 0.004, 0.01, 0.002]
    scales = [each.lr_scale for each in runner.feed(loss=[1.0] * 5, learning_rate=rates)]
    assert scales == pytest.approx([1.0, 1.0, 1.0, 0.5, 1.0])


def limited(runner: Runner, limit: float | None) -> None:
    """Sets the limit of the gradient norm as the host does."""
    given = None if limit is None else np.float32(limit)
    runner.state = runner.engine.limit_norm(runner.state, given)


@pytest.mark.parametrize("release", [0.0, None, np.nan, np.inf, -1.0, 1e-40])
def test_the_norm_is_limited_until_the_host_releases_it(release):
    runner = Runner(watching("nonfinite", RuleConfig(NOT_FINITE, skip=True)))
    assert runner.step(loss=1.0, grad_norm=8.0).grad_scale == 1
    limited(runner, 2.0)
    for norm, scale in ((8.0, 0.25), (2.0, 1.0), (np.nan, 1.0), (1e20, 2e-20), (8.0, 0.25)):
        decision = runner.step(loss=1.0, grad_norm=norm)
        assert decision.grad_scale == pytest.approx(scale, rel=1e-6)
        assert decision.skip == np.isnan(norm)
        assert runner.state.last.decision.grad_scale == decision.grad_scale
    assert runner.state.tally.clips == 3
    limited(runner, release)
    assert runner.state.norm_limit == 0
    assert runner.step(loss=1.0, grad_norm=8.0).grad_scale == 1
    assert runner.state.tally.clips == 3


def test_a_limit_and_a_clip_are_the_smaller_of_both_and_the_clip_learns_as_before():
    """A limit is no reason for another baseline: the rule sees the raw norms, as always."""
    free, held = Runner(FULL), Runner(FULL)
    norms = np.exp(np.random.default_rng(0).normal(0, 0.3, 60))
    norms[40:50:3] *= 100
    for i, norm in enumerate(norms):
        if i == 30:
            limited(held, 0.8)
        alone, both = (each.step(loss=1.0, grad_norm=norm) for each in (free, held))
        if i < 30:
            assert same(alone, both)
            continue
        expected = min(alone.grad_scale, 1.0 if norm <= 0.8 else 0.8 / norm)
        assert both.grad_scale == (1.0 if both.skip else pytest.approx(expected, rel=1e-5))
    assert same(free.state.clip, held.state.clip)
    assert same(free.state.detectors, held.state.detectors)


def test_frozen_steps_are_skips_without_a_cause():
    """They open no incident and cost no budget; the limit of the norm ends them."""
    runner = Runner(watching("nonfinite", RuleConfig(NOT_FINITE, skip=True)))
    runner.state = runner.engine.freeze(runner.state)
    for _ in range(20):
        decision = runner.step(loss=1.0, grad_norm=8.0)
        assert decision.skip
        assert decision.cause == decision.action == 0
        assert decision.grad_scale == 1
    assert runner.state.tally.skips == 20
    assert runner.state.tally.clips == runner.state.incident.number == 0
    limited(runner, 2.0)
    decision = runner.step(loss=1.0, grad_norm=8.0)
    assert not decision.skip
    assert decision.grad_scale == pytest.approx(0.25)


@pytest.mark.parametrize("clip", [None, "zclip", "adagc"])
def test_a_step_without_a_limit_has_none_of_its_operations(clip):
    """So torch's step costs nothing for it; and the decisions are the same."""
    groups = policies.GROUPS if clip == "adagc" else 0
    engine = Engine(policies.full(clip))
    trace = fuzz.signals(np.random.default_rng(3), 60, 10, groups=groups)
    a = b = engine.init(groups=groups, batch=(10,))
    for i in range(60):
        if i in (20, 40):
            limit = np.float32(0.1 if i == 20 else 0.0)
            a, b = (engine.limit_norm(state, limit) for state in (a, b))
        if i == 30:
            a, b = engine.freeze(a), engine.freeze(b)
        current = engine.specialised_for(b)
        assert current is engine.specialised_for(b)
        assert current.limits_norm == (20 <= i < 40)
        assert current.scales_grads == (clip is not None or current.limits_norm)
        a, first = engine.step(a, fuzz.at(trace, i))
        b, second = current.step(b, fuzz.at(trace, i))
        assert same((a, first), (b, second))
    assert a.tally.clips.any()
    assert (a.tally.skips >= 10).all()


def test_an_announced_change_at_a_step_that_the_caller_skips_holds_for_the_next():
    """A GradScaler may drop the very step for which the program announces its change."""
    for announced in (False, True):
        config = watching("grad_spike", window=3)._replace(grace_steps=50)
        runner = Runner(config)
        runner.feed(grad_norm=[1.0] * 9)
        runner.step(grad_norm=np.inf, change_expected=announced, externally_skipped=True)
        assert bool(runner.state.change_expected) is announced
        for _ in range(2):  # a search for the loss scale takes several steps
            runner.step(grad_norm=np.inf, change_expected=False, externally_skipped=True)
        first = runner.step(grad_norm=1e4, change_expected=False, externally_skipped=False)
        assert bool(first.cause) is not announced
        assert not runner.state.change_expected, "the request is used once"


def test_an_evaluation_at_a_step_that_the_caller_skips_counts():
    """The loss of the skipped step is not learnt, but the evaluation is of the weights."""
    alarm = RuleConfig(int(Cause.OVERFIT), action=int(Action.ALERT))
    runner = Runner(watching("overfit", alarm, max_gap=1.0, patience=2))
    nan = np.nan
    runner.feed(loss=[1.0] * 9, eval_loss=[nan] * 8 + [5.0], externally_skipped=[False] * 9)
    before = runner.state.detectors[0]
    skipped = runner.step(loss=3.0, eval_loss=5.0, externally_skipped=True)
    assert not skipped.cause
    assert not skipped.action
    assert runner.state.detectors[0] == before._replace(streak=2), "nothing else is learnt"
    following = runner.step(loss=1.0, eval_loss=nan, externally_skipped=False)
    assert following.cause == Cause.OVERFIT
    assert following.action == Action.ALERT
    # An evaluation that is as low as the training loss ends the overfitting in the same way.
    runner.step(loss=3.0, eval_loss=1.0, externally_skipped=True)
    assert not runner.step(loss=1.0, eval_loss=nan, externally_skipped=False).cause
