"""How much of healcore a reader walks through: files and calls of one healthy step."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType

import torch

from healcore.torch import attach


def test_a_healthy_torch_step_is_short():
    """From `observe` to the end of `optimizer.step()`, without comprehensions."""
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    heal = attach(optimizer, "default")
    calls: Counter[str] = Counter()

    def count(frame: FrameType, event: str, _: object) -> None:
        file, name = frame.f_code.co_filename, frame.f_code.co_name
        if event == "call" and "/healcore/" in file and (name[0] != "<" or name == "<lambda>"):
            calls[file] += 1

    for _ in range(30):
        loss = model(torch.ones(4, 8)).square().mean()
        loss.backward()
        calls.clear()
        sys.setprofile(count)
        heal.observe(loss)
        optimizer.step()
        sys.setprofile(None)
        optimizer.zero_grad()
    assert len(calls) <= 11, calls  # and the engine's step, which is recorded
    assert calls.total() <= 44, calls
