"""How many evaluations a run pays for: credit, debt, and the price of an evaluation."""

import pytest

from healcore.runtime.run.witness.evidence import RECENT
from healcore.runtime.run.witness.witness import MAX_DEBT
from tests.runtime.run.witness.arithmetic import MAX_CREDIT, PER_STEP, TO_VERDICT
from tests.runtime.run.witness.toy_driver import (
    ToyRun,
    healthy_run,
    noisy,
    train_damaged,
    train_healthy,
)


def test_within_an_accumulation_nothing_is_compared():
    run = ToyRun(lambda weight, batch: weight + batch % 7)
    run.take(0)
    checks = run.driver.evaluations  # of the loss_fn

    run.driver.weight, run.driver.accumulates = 500.0, True
    for step in range(200):
        run.take(step, alarm=True)

    assert run.driver.evaluations == checks
    assert run.witness.state.spent == 0.0


@pytest.mark.parametrize("alarm", [False, True], ids=["no alarm", "alarms"])
def test_a_healthy_run_costs_at_most_one_percent(alarm):
    """And 30 evaluations at the start, also with alarms at every step."""
    run = ToyRun(noisy)
    train_healthy(run, 5000, alarm=alarm)

    most = MAX_CREDIT + PER_STEP * 5000 + 4  # one comparison may begin with any credit
    assert run.driver.evaluations <= most
    if alarm:
        assert run.driver.evaluations > 0.8 * most


def test_the_debt_of_a_suspicion_is_bounded():
    """At most `MAX_DEBT / PER_STEP` = 1,333 steps without a comparison after any suspicion."""
    # The run has spent its credit, and earns the next comparison.
    run = ToyRun(noisy)
    train_healthy(run, 1250, alarm=True)
    while run.witness.state.spent >= MAX_CREDIT:
        train_healthy(run, 1)

    # The weights are damaged, for too few steps for a verdict. Then they are good again.
    began, level = run.step, run.driver.weight
    trouble = TO_VERDICT - 5
    assert train_damaged(run, trouble) is None
    assert run.witness.state.has_evidence
    while run.witness.state.has_evidence:
        assert run.take(run.step, weight=level * 0.9, alarm=True) is None
    assert run.step - began < 3 * trouble + RECENT, "small wins end it once they are the usual"

    # The run pays its debt before it compares again.
    began, before = run.step, run.driver.evaluations
    while run.driver.evaluations == before:
        train_healthy(run, 1, alarm=True)
    assert run.step - began == pytest.approx(MAX_DEBT / PER_STEP, abs=5)


def test_an_alarm_after_quiet_is_compared_without_credit():
    run = healthy_run(250)
    run.witness.state.spent = MAX_CREDIT + 20.0
    before = run.driver.evaluations
    run.take(run.step, alarm=True)
    assert run.driver.evaluations > before


def test_a_high_mean_loss_is_compared_now_and_then():
    run = healthy_run(250)
    run.witness.state.spent = 0.0
    before = run.driver.evaluations

    for _ in range(300):  # not above the last losses, but above the mean of the best anchor
        run.take(run.step, loss=5.0)

    evaluations = run.driver.evaluations - before
    assert 6 <= evaluations < 50, "after 10, 20, 40, 80, 100, ... steps"


@pytest.mark.parametrize(
    ("cost", "compared"),
    [
        pytest.param(1 / 3, 10, id="a forward pass"),
        pytest.param(1.0, 3, id="a training step"),
        pytest.param(4.0, 0, id="four training steps"),
    ],
)
def test_an_expensive_loss_fn_makes_regular_comparisons_rarer_and_alarms_no_less_heard(
    cost, compared
):
    """`cost` is in training steps. Nothing is measured, so no decision depends on the clock."""
    run = ToyRun(noisy, loss_fn_cost=cost)

    train_healthy(run, 1000)
    assert run.driver.evaluations == compared

    assert train_damaged(run).found_at == 1000 + TO_VERDICT - 1
