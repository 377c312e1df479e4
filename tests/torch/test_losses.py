"""Losses that a loop observes, and what `attach` logs on the logger `healcore` of its steps."""

import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core.decision import Action, Cause
from healcore.core.engine import Engine, RuleConfig
from healcore.errors import SignalError
from healcore.torch import attach
from healcore.torch.live_engine import RECORD_LAG
from healcore.torch.measurement import STEPS_WITHOUT_LOSS
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, host_and_device


class Loop:
    """A loop with one optimizer."""

    def __init__(self, where: Any = "host", engine: Any = policies.LOSSES) -> None:
        self.p = Parameter(torch.ones(2))
        self.optimizer = AdamW([self.p], fused=True)
        self.heal = attach(self.optimizer, engine, engine=where)

    def step(self, *losses: Any, **options: Any) -> float:
        """A step with usual gradients; returns the loss by which it was judged."""
        for loss in losses:
            self.heal.observe(loss, **options)
        self.p.grad = torch.ones(2)
        self.optimizer.step()
        return float(self.heal.metrics()["heal/loss"])

    def steps(self, *factors: float, observes: bool = True) -> None:
        for factor in factors:
            self.optimizer.zero_grad()
            loss = (self.p**2).sum() * factor
            if observes:
                self.heal.observe(loss)
            loss.backward()
            self.optimizer.step()


KINDS: dict[str, tuple[Any, float | None]] = {
    "int": (2, 2.0),
    "numpy": (np.array([2.5], np.float32), 2.5),
    "tensor": (torch.tensor([[2.5]], dtype=torch.float64), 2.5),
    "graph": (torch.tensor(2.5, dtype=torch.bfloat16, requires_grad=True) * 1, 2.5),
    "nan": (NAN, None),
    "inf": (torch.tensor(float("inf")), None),
    "huge graph": (torch.tensor([1e300], dtype=torch.float64, requires_grad=True) * 1, None),
}
"""Losses, and what a step is judged by, or None if float32 cannot hold the loss: a skip."""


@host_and_device
@pytest.mark.parametrize("kind", KINDS)
def test_one_number_of_any_kind_is_a_loss(where: Any, kind: str):
    loop = Loop(where)
    loss, expected = KINDS[kind]
    found = loop.step(loss, loss, weight=2.0)
    decision = loop.heal.last_decision()
    assert decision is not None
    assert decision.cause == (Cause.NONFINITE_LOSS if expected is None else 0)
    assert torch.equal(loop.p.detach(), torch.ones(2)) if expected is None else found == expected


@host_and_device
def test_a_step_is_judged_by_the_mean_of_its_micro_batches(where: Any):
    loop = Loop(where)
    for loss in (1.0, torch.tensor(2.0), torch.tensor(4.5)):
        loop.heal.observe(loss)
        loss /= 4  # the loop may change it in place
    loop.heal.observe(NAN, weight=0)  # without a token to predict
    assert loop.step() == 2.5
    assert loop.step(7.0) == 7.0


@host_and_device
@pytest.mark.parametrize(
    ("method", "loss", "word"),
    [
        ("observe", torch.ones(8), "mean"),
        ("observe", torch.tensor(1j), "complex"),
        ("observe", "3", "'3'"),
        ("observe", True, "True"),
        ("observe_eval", None, "None"),
    ],
    ids=lambda value: type(value).__name__,  # repr has an address: xdist collects by name
)
def test_a_value_that_is_no_loss_is_rejected(where: Any, method: str, loss: Any, word: str):
    """It changes nothing."""
    loop = Loop(where)
    loop.heal.observe(1.0)
    state = loop.heal.state_dict()
    with pytest.raises(SignalError, match=word):
        getattr(loop.heal, method)(loss)
    with pytest.raises(SignalError, match="weight"):
        loop.heal.observe(1.0, weight=-1)
    assert loop.heal.state_dict() == state
    assert loop.step() == 1.0


@host_and_device
def test_side_signals_reach_the_next_step_only(where: Any):
    loop = Loop(where, policies.EVERYTHING)
    names = [name for name, _ in policies.EVERYTHING.config.detectors]

    def judged() -> Any:
        state = policies.EVERYTHING.from_dict(loop.heal.state_dict())
        return repr(state.detectors[names.index("overfit")])

    fresh = judged()
    loop.heal.observe_eval(torch.tensor(2.0))
    loop.step(1.0)
    first = judged()
    assert first != fresh
    loop.step(1.0)
    assert judged() == first


@host_and_device
@pytest.mark.parametrize("announced", [False, True])
def test_an_announced_change_is_no_alarm(where: Any, announced: bool):
    loop = Loop(where)
    for i in range(20):
        loop.step(1.0 + 0.01 * (i % 3))
    if announced:
        loop.heal.expect_change()
    loop.step(50.0)
    assert int(loop.heal.metrics()["heal/alarms"]) == (not announced)


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    """Returns the lines of healcore since the last call."""
    caplog.set_level(logging.DEBUG, logger="healcore")

    def lines() -> list[str]:
        found = [r.getMessage() for r in caplog.records if r.name == "healcore"]
        caplog.clear()
        return found

    return lines


@host_and_device
def test_an_incident_is_one_line_of_any_length(where: Any, logged: Any):
    loop = Loop(where, policies.SKIPS)
    healthy = 3 * STEPS_WITHOUT_LOSS
    loop.steps(*[1.0] * healthy)
    assert not logged(), "without an alarm"
    loop.steps(*[NAN] * 40, *[1.0] * RECORD_LAG)
    (line,) = logged()
    begin = f"AdamW: step {healthy}: incident 1: nonfinite loss and nonfinite grad; "
    assert line.startswith(begin)
    assert where == "device" or line.endswith("; skipped")


def test_an_incident_of_a_loaded_state_is_not_logged_again(logged: Any):
    stopped, resumed = Loop(), Loop()
    stopped.steps(*[1.0] * 4, NAN)
    logged()
    resumed.heal.load_state_dict(stopped.heal.state_dict())
    resumed.steps(NAN, *[1.0] * 200, NAN)
    (line,) = logged()
    assert "step 206: incident 2: nonfinite" in line


@host_and_device
def test_an_order_that_attach_cannot_carry_out_and_a_cut_rate(where: Any, logged: Any):
    cuts = RuleConfig(policies.NONFINITE, skip=True, action=int(Action.CUT_LR))
    stops = RuleConfig(policies.NONFINITE, action=int(Action.STOP), count=2, within=9)
    engine = Engine(policies.CUTS.config._replace(rules=(cuts, stops)))
    Loop(where, engine).steps(*[1.0] * 4, *[NAN] * 3, *[1.0] * 30)
    lines = logged()
    assert sum("STOP" in line and "cannot roll back or stop" in line for line in lines) == 1
    assert any("learning rate × " in line for line in lines)
    assert len(lines) <= 5


@host_and_device
def test_a_forgotten_observe_is_logged_once(where: Any, logged: Any):
    Loop(where).steps(*[1.0] * 3 * STEPS_WITHOUT_LOSS, observes=False)
    (line,) = logged()
    assert f"no loss has been observed in {STEPS_WITHOUT_LOSS} steps" in line


@host_and_device
def test_a_loss_that_is_observed_after_its_step_has_a_line(where: Any, logged: Any):
    loop = Loop(where)
    for _ in range(RECORD_LAG + 4):
        loop.steps(1.0, observes=False)
        loop.heal.observe(1.0)
    (line,) = logged()
    assert "the first step had no loss, and the second step has one" in line
    assert "call observe(loss) before optimizer.step()" in line


@pytest.mark.parametrize("engine", ["host", "device"])
@pytest.mark.parametrize("policy", ["default", "pretraining"])
def test_the_loss_in_the_metrics_is_nan_until_a_finite_one_and_may_be_0(engine, policy):
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weight], lr=0.01)
    heal = attach(optimizer, policy, engine=engine)
    assert math.isnan(heal.metrics()["heal/loss"])
    for loss, shown in ((math.nan, math.nan), (0.0, 0.0), (math.nan, 0.0)):
        heal.observe(torch.tensor(loss))
        weight.grad = torch.full((2,), 0.1)
        optimizer.step()
        np.testing.assert_equal(float(heal.metrics()["heal/loss"]), shown)
    other = attach(torch.optim.SGD([weight], lr=0.01), policy, engine=engine)
    other.load_state_dict(heal.state_dict())
    assert float(other.metrics()["heal/loss"]) == 0
