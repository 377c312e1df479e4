"""An alert gives severity, diagnosis, action and reference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from healcore import Healer, IncidentContext
from healcore import policy as policies
from tests.healer.run_directory import events
from tests.healer.run_options import grouped

POLICY = policies.loads(
    """
schema = 1
name = "alerts"
[detect.nonfinite]
[detect.plateau]
window = 5
patience = 2
[detect.overfit]
max_gap = 0.5
patience = 1
[[respond]]
to = ["nonfinite"]
do = ["skip", "alert"]
[[respond]]
to = ["plateau", "overfit"]
do = ["alert"]
"""
)


def run(folder: Path, losses: list[float], *, evaluates: bool, **options: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with Healer(POLICY, state=state, store=folder, **grouped(options)) as healer:
        for _, wanted in zip(healer.batches(list(losses)), losses, strict=False):
            loss = (model(torch.ones(1)) * 0).sum() + wanted
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and healer.step == 35:
                healer.observe(eval_loss=9.0)


@pytest.mark.parametrize("cause", ["PLATEAU", "OVERFIT", "NONFINITE_LOSS"])
def test_an_alert_names_severity_diagnosis_action_and_reference(cause: str, tmp_path: Path):
    losses = [3.0 - 0.05 * step for step in range(40)]
    if cause == "PLATEAU":
        losses = [3.0] * 40
    if cause == "NONFINITE_LOSS":
        losses[30] = losses[31] = float("nan")
    tracked, contexts = list[Any](), list[IncidentContext]()
    tracker = SimpleNamespace(metrics=lambda *_: None, event=tracked.append)
    options = {"trackers": tracker, "on_incident": contexts.append}
    run(tmp_path, losses, evaluates=cause == "OVERFIT", **options)
    mine = [each for each in events(tmp_path, "alert") if cause in each["cause"]]
    alert = mine[0]
    assert "ALERT" in alert["action"]
    assert [each["step"] - alert["step"] for each in mine] in ([0], [0, 9])
    assert alert["severity"] == ("error" if cause == "NONFINITE_LOSS" else "warning")
    assert alert["diagnosis"]
    assert alert["references"]
    sent = [each["cause"] for each in tracked if each["kind"] == "alert"]
    assert sent == [each["cause"] for each in mine]
    assert contexts[0].failures[0].severity == alert["severity"]
    assert set(contexts[0].failures[0].references) <= {*alert["references"]}
