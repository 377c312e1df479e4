"""The recipes' attempts end in live runs: every rollback is paid for, and then the run stops."""

from __future__ import annotations

import pytest
import torch

from healcore.core.verdict import Action
from healcore.policy import load
from healcore.runtime.loop.termination import RunStopped
from healcore.torch import attach
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, train

GOOD, LAST = 60, 600
"""Steps before the loss is NaN for good; the longest run."""

RECIPES = [
    "kempnerforge",
    "self-healing-trl-default",
    "self-healing-trl-aggressive",
    "self-healing-trl-conservative",
]


@pytest.mark.parametrize(
    ("framework", "name"), [*(("torch", name) for name in RECIPES), ("jax", RECIPES[0])]
)
def test_a_healer_stops_after_the_last_attempt(framework, name, tmp_path):
    policy = load(name, rollback={"probation": 4})
    loop = loop_of(framework, Faults(always=range(GOOD, LAST)), policy)
    with pytest.raises(RunStopped, match="budget"):
        train(loop, policy, range(LAST), store=tmp_path, save_every=10)
    assert len(events(tmp_path, "rollback")) == policy.budget.recoveries


def orders_of_a_loop(name: str, *, answers: bool) -> list[Action]:
    """What `attach` orders in a loop that trains on after a stop, and may carry out rollbacks."""
    p = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([p], lr=1e-3)
    heal = attach(optimizer, name)
    saved, orders = heal.state_dict(), []
    for step in range(LAST):
        optimizer.zero_grad()
        loss = (p**2).sum() * (1.0 if step < GOOD else float("nan"))
        heal.observe(loss)
        loss.backward()
        optimizer.step()
        decision = heal.last_decision()
        assert decision is not None
        orders.append(Action(decision.action))
        if answers and orders[-1] & Action.ROLLBACK:
            heal.on_rollback(saved)
    return orders


@pytest.mark.parametrize("name", RECIPES)
def test_a_loop_that_reports_its_rollbacks_is_told_to_stop_after_the_last(name):
    orders = orders_of_a_loop(name, answers=True)
    back = [step for step, order in enumerate(orders) if order & Action.ROLLBACK]
    stops = [step for step, order in enumerate(orders) if order & Action.STOP]
    assert len(back) == load(name).budget.recoveries
    assert stops
    assert stops[0] > back[-1]


def test_rollbacks_that_a_loop_does_not_report_use_no_budget():
    orders = orders_of_a_loop("kempnerforge", answers=False)
    assert sum(bool(order & Action.ROLLBACK) for order in orders) > 3
    assert not any(order & Action.STOP for order in orders)
