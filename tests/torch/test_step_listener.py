"""What the listener of a healed step hears, and what becomes of the log meanwhile."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import SGD

from healcore.torch import attach
from healcore.torch.measurement import Measurement


class Heard:
    """A listener that keeps what it hears."""

    def __init__(self, parameter: Tensor) -> None:
        self._parameter = parameter
        self.calls: list[Any] = []

    def judged(self, measured: Measurement) -> None:
        self.calls.append(("judged", len(measured.params), float(self._parameter.detach())))

    def ended(self, skipped: bool | Tensor) -> None:
        self.calls.append(("ended", skipped, float(self._parameter.detach())))


def healed(**options: Any) -> tuple[Parameter, Any, Any]:
    """A weight of 1, its optimizer with a rate of 0.5, and the healed step."""
    parameter = Parameter(torch.ones(()))
    optimizer = SGD([parameter], lr=0.5)
    heal = attach(optimizer, "default", **options)
    return parameter, optimizer, heal.healed_step


def test_a_listener_hears_of_a_step_before_and_after_the_update():
    parameter, optimizer, step = healed()
    heard = Heard(parameter)
    step.listener = heard
    parameter.grad = torch.ones(())
    optimizer.step()
    assert heard.calls == [("judged", 1, 1.0), ("ended", False, 0.5)]


def test_a_listener_hears_of_skipped_unjudged_and_failed_steps():
    parameter, optimizer, step = healed()
    heard = Heard(parameter)
    step.listener = heard
    parameter.grad = torch.full((), math.nan)
    optimizer.step()
    assert heard.calls == [("judged", 1, 1.0), ("ended", True, 1.0)]
    heard.calls.clear()
    optimizer.zero_grad()
    optimizer.step()
    assert heard.calls == [("ended", False, 1.0)], "without gradients nothing is judged"
    heard.calls.clear()
    parameter.grad = torch.ones(())
    optimizer.register_step_pre_hook(lambda *_: math.sqrt(-1))  # raises within the step
    with pytest.raises(ValueError, match="math domain"):
        optimizer.step()
    assert heard.calls == [("judged", 1, 1.0)]


def test_a_listener_hears_of_a_step_that_a_scaler_has_dropped():
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    parameter, optimizer, step = healed(scaler=scaler)
    heard = Heard(parameter)
    step.listener = heard
    for gradient in (1.0, math.inf):
        heard.calls.clear()
        scaler.scale(parameter * gradient).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        step.judge_dropped()
    assert heard.calls == [("judged", 0, 0.5), ("ended", False, 0.5)]


def test_only_the_listener_or_the_log_hears_of_a_step(capfd):
    parameter, optimizer, step = healed(console=True)
    heard = Heard(parameter)

    def lines_of_bad_step() -> list[str]:
        heard.calls.clear()
        for value in (1.0, math.nan, *[1.0] * 60):  # the last steps end the incident
            parameter.grad = torch.full((), value)
            optimizer.step()
        return [line for line in capfd.readouterr().err.splitlines() if "incident" in line]

    assert len(lines_of_bad_step()) == 1
    assert heard.calls == []
    step.listener = heard
    assert lines_of_bad_step() == []
    assert len(heard.calls) == 2 * 62
    step.remove_listener()
    assert len(lines_of_bad_step()) == 1
    assert heard.calls == []
