"""The demo's training loop in torch; everything of healcore in it is marked."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from healcore import Checkpoints, Healer, Logging, RunStopped  # <- healcore
from healcore.demo.runs import FIXED_CLIP, SAVE_EVERY, Step
from healcore.demo.scenario import Scenario
from healcore.torch.demo.model import TorchTransformer


def train(
    scenario: Scenario, arm: str, policy: Any, folder: Path
) -> Generator[Step, None, torch.Tensor]:
    """Trains one model, yielding each step so that runs can take turns; returns the held-out loss.

    `policy` and `folder` are those of the healed run. The step's number falls when it goes back.
    """
    torch.set_num_threads(1)  # for such small matrices more threads are slower
    model = TorchTransformer(scenario)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=scenario.weight_decay, fused=True
    )
    batches, healer = range(scenario.steps), None

    def loss_of(index: int) -> torch.Tensor:
        batch = scenario.training_batch(index)
        return model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights))

    with suppress(RunStopped), ExitStack() as stack:
        if arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state={"model": model, "optimizer": optimizer},
                    store=folder / "checkpoints",
                    logging=Logging(events=folder / "events.jsonl"),
                    loss_fn=loss_of,
                    checkpoints=Checkpoints(every=SAVE_EVERY),
                )
            )
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            for group in optimizer.param_groups:
                group["lr"] = scenario.learning_rate(step)

            optimizer.zero_grad()
            loss = healer.loss(index) if healer else loss_of(index)  # <- healcore
            loss.backward()
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            if arm == "fixed clip":
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), FIXED_CLIP, norm)
            optimizer.step()
            yield Step(step, index, loss.detach(), norm)

    batch = scenario.held_out_batch()
    with torch.no_grad():
        return model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights))
