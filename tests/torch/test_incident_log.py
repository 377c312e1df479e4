"""`attach` logs incidents on the logger `healcore` once, not at every step."""

from __future__ import annotations

import logging
import re
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter
from torch.optim import AdamW

from healcore.core import step_record
from healcore.core.engine import Engine, RuleConfig
from healcore.core.verdict import Action
from healcore.torch import Healing, attach
from healcore.torch.healed_step import RECORD_LAG
from healcore.torch.incident_log import HITS, WITHOUT_LOSS, LoopMistakes
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
    loop.steps(*[1.0] * 4, *[NAN] * 40, *[1.0] * RECORD_LAG)
    (line,) = logged(lines)
    assert re.match(r"AdamW: step 4: incident 1: nonfinite loss and nonfinite grad; ", line)
    assert where == "device" or line.endswith("; skipped")


def test_an_incident_of_a_loaded_state_is_not_logged_again(lines: Lines):
    stopped, resumed = Loop(), Loop()
    stopped.steps(*[1.0] * 4, NAN)
    lines.clear()
    resumed.heal.load_state_dict(stopped.heal.state_dict())
    resumed.steps(NAN, *[1.0] * 200, NAN)
    (line,) = logged(lines)
    assert "step 206: incident 2: nonfinite" in line


@host_and_device
def test_an_order_that_attach_cannot_carry_out_and_a_cut_rate(where: Where, lines: Lines):
    loop = Loop(ORDERS, where)
    loop.steps(*[1.0] * 4, *[NAN] * 3, *[1.0] * 30)
    assert len(logged(lines, "STOP", "cannot roll back or stop")) == 1
    assert logged(lines, "learning rate × ")
    assert len(logged(lines)) <= 5


@host_and_device
def test_a_forgotten_observe_is_logged_once(where: Where, lines: Lines):
    loop = Loop(policies.LOSSES, where)
    loop.steps(*[1.0] * 3 * WITHOUT_LOSS, observes=False)
    (line,) = logged(lines)
    assert f"no loss has been observed in {WITHOUT_LOSS} steps" in line


# -- other code that clips -------------------------------------------------------------------------


def warnings_of(norms: np.ndarray) -> int:
    found, empty = LoopMistakes(policies.SKIPS), step_record.to_host([0] * len(step_record.FIELDS))
    records = (empty._replace(grad_norm=float(norm)) for norm in norms)
    return sum(len(found.add(each, has_seen_loss=True)) for each in records)


@pytest.mark.parametrize("share", [1.0, 0.2])
def test_a_limit_is_noticed_once(share: float):
    """Also where it is reached at some steps only, and by gradients of few digits."""
    random = np.random.default_rng(0)
    limit = 0.3 * (1 + 5e-5 * random.standard_normal(1000)).astype(np.float32)
    norms = np.where(random.random(1000) < share, limit, 0.3 * random.random(1000))
    assert warnings_of(norms) == 1
    assert warnings_of(norms[: HITS - 1]) == 0


@pytest.mark.parametrize("spread", [0.003, 0.02, 0.3])
def test_norms_without_a_limit(spread: float):
    random = np.random.default_rng(1)
    norms = np.exp(spread * random.standard_normal(10_000)).astype(np.float32)
    for drift in (0.0, 1e-5, -1e-5):
        assert warnings_of(norms * np.exp(drift * np.arange(10_000))) == 0
