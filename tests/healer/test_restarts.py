"""What a start after a crash must know, one fact per test. All at once: test_killed.py."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from tests.healer.run_directory import events
from tests.healer.training_loops import loop_of, rules, train


def test_random_numbers_of_later_epochs_are_new_ones(tmp_path, monkeypatch):
    """A loop that calls `batches` once for every epoch."""

    def go(drawn: list[float], folder: Any, die: bool = False) -> None:
        state = loop_of("torch").state
        with Healer(rules(), state=state, store=folder, checkpoints=Checkpoints(every=5)) as healer:
            data = list(range(10))
            for epoch in range(3):
                for number in healer.batches(data):
                    if die and (epoch, number) == (0, 7):
                        healer.store.wait()
                        raise RuntimeError("power")
                    drawn.append(torch.rand(()).item())
                    loss = state["model"](torch.ones(1, 4)).sum()
                    healer.observe(loss)
                    loss.backward()
                    state["optimizer"].step()
                    state["optimizer"].zero_grad()

    clean, first, second = [], [], []
    go(clean, tmp_path / "clean")
    with pytest.raises(RuntimeError, match="power"):
        go(first, tmp_path / "killed", die=True)
    go(second, tmp_path / "killed")
    assert second == clean[5:]


def test_a_restart_whose_data_are_used_up_is_reported(tmp_path):
    def stumble(healer, number):
        if healer.step == 27:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=stumble)
    train(loop_of("torch"), rules(), range(20), store=tmp_path)
    assert any("exhausted" in event["problem"] for event in events(tmp_path, "problem"))
