"""A killed run goes on from the newest state on disk, however short it is."""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Healer
from healcore import policy as policies
from healcore.events import read
from healcore.runtime.checkpoints import restart_points
from tests.healer.run_options import grouped

STEPS = 60
NAN_ONLY = policies.loads(
    """
    schema = 1
    name = "nan-only"
    [detect.nonfinite]
    [[respond]]
    to = ["nonfinite"]
    do = ["skip"]
    """
)
"""No other alarm delays a save. Its probation is that of the default policy, 100 steps."""

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the killed processes")


def run(folder: Path, *, kill_at: int = -1, nan_from: int = STEPS, **options: Any) -> list[int]:
    """Trains on 60 batches, those from `nan_from` on with NaN; the steps that it began with."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(STEPS, 8, 4, generator=torch.Generator().manual_seed(1))
    rows[nan_from:] = math.nan
    steps = []
    state = {"model": model, "optimizer": optimizer}
    with Healer(NAN_ONLY, state=state, store=folder, **grouped(options)) as healer:
        for batch in healer.batches(list(rows)):
            steps.append(healer.step)
            if healer.step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    torch.save(model.state_dict(), folder / "weights.pt")
    return steps


def killed(folder: Path, **options: Any) -> None:
    process = multiprocessing.get_context("fork").Process(
        target=run, args=(folder,), kwargs=options
    )
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL


def restarts(folder: Path) -> list[int]:
    found = read(folder / "healcore.events.jsonl").events
    return [each["step"] for each in found if each["kind"] == "save" and each["why"] == "restart"]


def kept(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("step*")}


def test_a_short_run_loses_a_few_steps(tmp_path: Path):
    whole, again = tmp_path / "whole", tmp_path / "killed"
    run(whole)
    assert restarts(whole) == [10, 20, 30, 40, 53]
    assert len(kept(whole)) == 2, "those of the start and of the end"
    killed(again, kill_at=58)
    assert len(kept(again)) <= 5, "a process that is killed may not have deleted all old ones"
    steps = run(again)
    assert 40 <= steps[0] <= 53, "the write of the last one may be cut off"
    assert steps[-1] == STEPS - 1
    weights = [torch.load(folder / "weights.pt") for folder in (whole, again)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])


def test_none_is_saved_in_trouble(tmp_path: Path):
    killed(tmp_path, nan_from=37, kill_at=55)
    assert restarts(tmp_path) == [10, 20, 30]


def test_with_save_every_there_are_those_that_are_asked_for(tmp_path: Path):
    run(tmp_path / "none", save_every=100)
    assert restarts(tmp_path / "none") == []
    run(tmp_path / "some", save_every=100, restart_every=25)
    assert restarts(tmp_path / "some") == [25, 50]


def test_no_rollback_goes_to_one(tmp_path: Path):
    """It would be the newest finite state before the onset; the snapshot of the start has more."""
    rules = [{"to": ["nonfinite"], "do": ["skip", "rollback"]}]
    run(tmp_path, nan_from=58, respond=rules, rollback={"confirm": False, "skip_batches": 2})
    events = read(tmp_path / "healcore.events.jsonl").events
    assert [each["checkpoint"] for each in events if each["kind"] == "rollback"] == [0]


def test_what_they_cost_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(restart_points, "_SECONDS", -1.0)  # as if that much had been used too much
    monkeypatch.setattr(restart_points, "_TIME_SHARE", 0.0)
    run(tmp_path)
    assert restarts(tmp_path) == []
