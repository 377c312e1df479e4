"""Metrics and events of a healed run in TensorBoard, and in a tracker of your own.

One batch is ruined, and the gradient of another is far too large. The first step is skipped,
the second is clipped; both can be seen in `tensorboard --logdir DIRECTORY`. Add "wandb" or
"trackio" to the list to use these trackers, or an object of your own, as for MLflow.

python examples/trackers.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import healcore  # <- healcore

STEPS, RUINED, LARGE = 120, 60, 90


class Counter:
    """A tracker of your own: counts steps, skips and clips."""

    def __init__(self) -> None:
        self.steps = self.skipped = self.clipped = 0
        self.kinds: set[str] = set()

    def metrics(self, step: int, values: dict[str, float]) -> None:
        self.steps += 1
        self.skipped += values["heal/skip"] == 1
        self.clipped += step == LARGE and values["heal/grad_scale"] < 1

    def event(self, event: Mapping[str, Any]) -> None:
        self.kinds.add(event["kind"])


def main(directory: str) -> None:
    """Train a small regression, and print what the trackers have got."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    inputs = [torch.randn(64, 8) for _ in range(STEPS)]
    scale = {RUINED: float("nan"), LARGE: 100.0}
    counter = Counter()
    state = {"model": model, "optimizer": optimizer}
    trackers = [f"tensorboard:{directory}", counter]  # <- healcore
    policy = healcore.policy.load("default", clip={"kind": "zclip", "max_norm": None})
    with healcore.Healer(policy, state=state, trackers=trackers) as healer:  # <- healcore
        for x in healer.batches(inputs):  # <- healcore
            targets = x.sum(dim=1, keepdim=True).sin() * scale.get(healer.step, 1.0)
            loss = (model(x) - targets).square().mean()
            healer.observe(loss)  # <- healcore
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    seen = " ".join(sorted(counter.kinds))
    print(f"steps {counter.steps}, skipped {counter.skipped}, clipped {counter.clipped}: {seen}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
