"""What comparisons cost: credit, debt and the price of an evaluation."""

from __future__ import annotations

import pytest

from healcore.runtime.dominance import evidence
from healcore.runtime.dominance.evidence import MAX_CREDIT, MAX_DEBT, RECENT
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


def test_the_debt_of_a_suspicion_is_bounded():
    """At most 1,333 steps without a comparison, however long the suspicion was."""
    run = Run(noisy)
    spend(run)
    swing(run, 15)
    before, began = run.driver.evaluations, run.step
    while run.driver.evaluations == before:
        healthy(run, 1, alarm=True)
    assert MAX_DEBT / PER_STEP - 5 < run.step - began < MAX_DEBT / PER_STEP + 5


@pytest.mark.parametrize(
    ("seconds", "compared"),
    [
        (lambda batch: 0.0, [10]),
        (lambda batch: 100.0 if batch in (99, 499) else 0.1, [10]),
        (lambda batch: 4.0, [1, 2, 3, 4]),
    ],
    ids=["fast", "some are slow, as the first, which compiles", "as slow as four steps"],
)
def test_slow_evaluations_make_heartbeats_rarer_and_alarms_no_less_heard(
    monkeypatch, seconds, compared
):
    clock = [0.0]
    monkeypatch.setattr(evidence.time, "monotonic", lambda: clock[0])

    def loss(weight: float, batch: int) -> float:
        clock[0] += seconds(batch)
        return noisy(weight, batch)

    run, found = Run(loss), None
    run.dominance.loss_function.gives_loss = True
    for step in range(1250):
        clock[0] += 1.0
        level, is_damaged = 10.0 / (1 + min(step, 999) / 50), step >= 1000
        level += 5 * is_damaged
        given = noisy(level, step)
        found = found or run.take(step, weight=level, alarm=is_damaged, loss=given)
        if step == 999:
            assert found is None
            assert run.driver.evaluations in compared
    assert found is not None
    assert found.found == 1000 + 19
