"""`attach` logs incidents on the logger `healcore` once, not at every step."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core.engine import Engine, RuleConfig
from healcore.core.verdict import Action
from healcore.runtime.healer import Healer
from healcore.torch import Healing, attach
from healcore.torch.engines import READ_EVERY
from healcore.torch.incident_log import WITHOUT_LOSS, WITHOUT_STEP
from tests.torch import policies
from tests.torch.optimizer_cases import NAN, Where, host_and_device

Lines = pytest.LogCaptureFixture

ORDERS = Engine(
    policies.CUTS.config._replace(
        rules=(
            RuleConfig(policies.NONFINITE, skip=True, action=int(Action.CUT_LR)),
            RuleConfig(policies.NONFINITE, action=int(Action.STOP), count=2, within=9),
        )
    )
)


class Loop:
    """A loop with one optimizer."""

    def __init__(self, engine: Any = policies.SKIPS, where: Where = "host") -> None:
        self.p = Parameter(torch.ones(2))
        self.optimizer = AdamW([self.p], fused=True)
        self.heal: Healing = attach(self.optimizer, engine, engine=where)

    def steps(self, *factors: float, observes: bool = True) -> None:
        for factor in factors:
            self.optimizer.zero_grad()
            loss = (self.p**2).sum() * factor
            if observes:
                self.heal.observe(loss)
            loss.backward()
            self.optimizer.step()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> Lines:
    caplog.set_level(logging.DEBUG, logger="healcore")
    return caplog


def logged(lines: Lines, *parts: str) -> list[str]:
    texts = [r.getMessage() for r in lines.records if r.name == "healcore"]
    return [text for text in texts if all(part in text for part in parts)]


@host_and_device
def test_a_run_without_alarms_logs_nothing(where: Where, lines: Lines):
    Loop(where=where).steps(*[1.0] * 3 * WITHOUT_LOSS)
    assert not logged(lines)


@host_and_device
def test_an_incident_is_one_line_of_any_length(where: Where, lines: Lines):
    loop = Loop(where=where)
    loop.steps(*[1.0] * 4, *[NAN] * 40, *[1.0] * 2 * READ_EVERY)
    (line,) = logged(lines)
    assert re.match(r"AdamW: step 4: incident 1: nonfinite loss and nonfinite grad; ", line)
    assert where == "device" or line.endswith("; skipped")


def test_many_incidents_are_fewer_lines(lines: Lines):
    loop = Loop()
    quiet = int(loop.heal.engine.config.incident.quiet_steps) + 1
    for _ in range(70):
        loop.steps(NAN, *[1.0] * quiet)
    numbers = [int(line.split("incident ")[1].split(":")[0]) for line in logged(lines)]
    assert numbers == [*range(1, 11), 16, 32, 64]


@host_and_device
def test_an_order_that_attach_cannot_carry_out_and_a_cut_rate(where: Where, lines: Lines):
    loop = Loop(ORDERS, where)
    loop.steps(*[1.0] * 4, *[NAN] * 3, *[1.0] * 30)
    (order,) = logged(lines, "STOP")
    assert "attach() alone cannot roll back or stop" in order
    assert logged(lines, "learning rate × ")
    assert len(logged(lines)) <= 5


@host_and_device
@pytest.mark.parametrize("answer", ["nothing", "last_decision", "decision", "decline", "load"])
def test_an_order_is_answered_and_not_only_read(where: Where, lines: Lines, answer: str):
    loop = Loop(ORDERS, where)
    loop.steps(*[1.0] * 4)
    for _ in range(60):
        loop.steps(NAN)
        decision = loop.heal.last_decision()
        assert decision is not None
        if answer == "decline":
            loop.heal.decline()
        elif answer == "load":
            loop.heal.load_state_dict(loop.heal.state_dict())
        elif answer == "decision":
            assert loop.heal.decision is not None
    stops = logged(lines, "STOP", "the loop continues to train")
    assert bool(stops) == (answer not in ("decline", "load"))
    assert len(stops) <= 1


def test_the_line_names_observe_mode(lines: Lines):
    Loop(policies.OBSERVES).steps(1.0, NAN, 1.0)
    (line,) = logged(lines)
    assert line.endswith("nothing is changed, the policy observes")


@host_and_device
def test_a_forgotten_observe_is_logged_once(where: Where, lines: Lines):
    loop = Loop(policies.LOSSES, where)
    loop.steps(*[1.0] * 3 * WITHOUT_LOSS, observes=False)
    (line,) = logged(lines)
    assert f"no loss has been observed in {WITHOUT_LOSS} steps" in line


def test_a_replaced_or_copied_optimizer_is_logged(lines: Lines):
    loop = Loop()
    loop.steps(1.0)
    loop.optimizer = AdamW([loop.p])
    loop.steps(*[1.0] * 2 * WITHOUT_STEP)
    (line,) = logged(lines)
    assert "replaced or copied" in line


def test_a_long_accumulation_is_fine(lines: Lines):
    loop = Loop()
    for _ in range(3):
        for _ in range(WITHOUT_STEP - 2):
            loop.heal.observe(1.0)
        loop.steps(1.0)
    assert not logged(lines)


def test_in_a_healer_only_the_healer_logs(lines: Lines):
    loop = Loop()
    with Healer(policies.SKIPS, state={"p": [loop.p], "optimizer": loop.optimizer}) as healer:
        for i in healer.batches(range(150)):
            loop.steps(NAN if i == 30 else 1.0)
    assert not logged(lines, "AdamW")
