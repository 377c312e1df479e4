"""A soft step in the events: in its alarm, and never as a cut of the learning rate."""

from __future__ import annotations

import logging

import pytest
import torch

import healcore
from healcore.core.detectors import DETECTORS
from healcore.core.engine import Engine, EngineConfig, RuleConfig
from healcore.core.verdict import Action, Cause
from healcore.events.log import read

SOFT = Engine(
    EngineConfig(
        detectors=(("grad_spike", DETECTORS["grad_spike"](window=3)),),
        rules=(RuleConfig(int(Cause.GRAD_SPIKE), action=int(Action.SOFT_STEP)),),
    )
)


@pytest.mark.parametrize("healer", [True, False], ids=["Healer", "attach"])
def test_it_is_reported_as_what_it_is(tmp_path, healer, caplog):
    caplog.set_level(logging.INFO, logger="healcore")
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    sizes = [1.0] * 6 + [1000.0] + [1.0] * 6
    if not healer:
        healcore.torch.attach(optimizer, SOFT)
        for size in sizes:
            _step(model, optimizer, size)
        assert "learning rate ×" not in caplog.text
        return
    events = tmp_path / "run.events.jsonl"
    state = {"model": model, "optimizer": optimizer}
    with healcore.Healer(SOFT, state=state, events=events) as run:
        for size in run.batches(sizes):
            _step(model, optimizer, size, run.observe)
    found = read(events).events
    alarms = [each for each in found if each["kind"] == "alarm"]
    assert [(each["step"], each["action"], each["lr_scale"]) for each in alarms] == [
        (6, ["SOFT_STEP"], pytest.approx(0.1))
    ]
    assert not [each for each in found if each["kind"] in ("lr", "order")]


def _step(model, optimizer, size, observe=None):
    optimizer.zero_grad()
    loss = size * model(torch.ones(1)).sum()
    if observe is not None:
        observe(loss)
    loss.backward()
    optimizer.step()
