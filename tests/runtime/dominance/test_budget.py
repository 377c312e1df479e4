"""What comparisons cost: credit, debt and the price of an evaluation."""

from __future__ import annotations

import pytest

from healcore.runtime.dominance import history
from healcore.runtime.dominance.anchor import RECENT
from healcore.runtime.dominance.history import MAX_CREDIT, MAX_DEBT
from tests.runtime.dominance.toy_driver import Run, healthy, noisy

PER_STEP = 0.03
"""Evaluations that a step of a healthy run pays for: 1 % of a step that costs three."""


@pytest.mark.parametrize("gives_loss", [False, True])
@pytest.mark.parametrize("alarm", [False, True])
def test_a_healthy_run_costs_at_most_one_percent(alarm, gives_loss):
    """And 30 evaluations at the start, also with alarms at every step."""
    run = Run(noisy)
    run.dominance.loss_function.gives_loss = gives_loss
    healthy(run, 5000, alarm=alarm)
    most = MAX_CREDIT + PER_STEP * 5000 + 4  # one comparison may begin with any credit
    assert run.driver.evaluations <= most
    if alarm:
        assert run.driver.evaluations > 0.8 * most


def spend(run: Run) -> None:
    """Comparisons spend what is saved up, until the next comparison may begin."""
    healthy(run, 1250, alarm=True)
    while run.dominance._budget.credit <= 0:
        healthy(run, 1)


def swing(run: Run, steps: int) -> None:
    """The weight is too high for some steps, and then falls again: a false suspicion."""
    before, level = run.step, run.driver.weight
    for _ in range(steps):
        assert run.take(run.step, weight=level + 5.0, alarm=True) is None
    assert run.dominance.suspects
    while run.dominance.suspects:
        assert run.take(run.step, weight=level * 0.9, alarm=True) is None
    assert run.step - before < 3 * steps + RECENT, "small wins end it once they are the usual"


def test_a_false_suspicion_is_paid_for():
    """The comparisons of a suspicion cost what others cost; the run then waits."""
    run = Run(noisy)
    run.dominance.loss_function.gives_loss = True
    spend(run)
    before = run.driver.evaluations
    swing(run, 3)
    cost = run.driver.evaluations - before
    assert 9 < cost < MAX_CREDIT + MAX_DEBT
    while run.driver.evaluations == before + cost:
        healthy(run, 1, alarm=True)
    forgiven = max(0.0, cost - MAX_DEBT)
    assert run.driver.evaluations <= MAX_CREDIT + PER_STEP * run.step + 4 + forgiven


def test_the_debt_of_a_suspicion_is_bounded():
    """At most 1,333 steps without a comparison, however long the suspicion was."""
    run = Run(noisy)
    spend(run)
    swing(run, 15)
    before, began = run.driver.evaluations, run.step
    while run.driver.evaluations == before:
        healthy(run, 1, alarm=True)
    assert MAX_DEBT / PER_STEP - 5 < run.step - began < MAX_DEBT / PER_STEP + 5


def test_without_alarms_there_is_one_comparison_in_a_hundred_steps(monkeypatch):
    monkeypatch.setattr(history.time, "monotonic", lambda: 0.0)
    run = Run(noisy)
    run.dominance.loss_function.gives_loss = True
    healthy(run, 1000)
    assert run.driver.evaluations == 10


def test_a_slow_evaluation_makes_heartbeats_rarer_and_alarms_no_less_heard(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(history.time, "monotonic", lambda: clock[0])

    def slow(weight: float, batch: int) -> float:
        clock[0] += 4.0
        return noisy(weight, batch)

    run = Run(slow)
    run.dominance.loss_function.gives_loss = True
    for _ in range(1000):
        clock[0] += 1.0
        loss = noisy(10.0 / (1 + run.step / 50), run.step)
        assert run.take(run.step, weight=10.0 / (1 + run.step / 50), loss=loss) is None
    assert run.driver.evaluations <= 4, "an evaluation takes as long as four steps"
    level = run.driver.weight + 5
    found = None
    for _ in range(250):
        clock[0] += 1.0
        found = found or run.take(run.step, weight=level, alarm=True, loss=noisy(level, run.step))
    assert found is not None
    assert found.found == 1000 + 19


def test_one_slow_evaluation_does_not_make_heartbeats_rarer(monkeypatch):
    """For example the first, which compiles."""
    clock = [0.0]
    monkeypatch.setattr(history.time, "monotonic", lambda: clock[0])
    slow = [99, 499]

    def loss(weight: float, batch: int) -> float:
        clock[0] += 100.0 if batch in slow else 0.1
        return noisy(weight, batch)

    run = Run(loss)
    run.dominance.loss_function.gives_loss = True
    for _ in range(1000):
        clock[0] += 1.0
        weight = 10.0 / (1 + run.step / 50)
        assert run.take(run.step, weight=weight, loss=noisy(weight, run.step)) is None
    assert run.driver.evaluations == 10
