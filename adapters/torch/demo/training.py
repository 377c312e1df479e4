"""The demo's training loop in torch; everything of healcore in it is marked."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch

from healcore import Healer  # <- healcore
from healcore.demo.history import FIXED_CLIP, History
from healcore.demo.scenario import Scenario
from healcore.demo.terms import SAVE_EVERY
from healcore.runtime.loop.exits import RunStopped  # <- healcore
from healcore.torch.attachment import healing_of
from healcore.torch.demo.model import ByteTransformer


def train(scenario: Scenario, history: History, policy: Any, folder: Path) -> Iterator[int]:
    """Trains one model, yielding after each step so that runs can take turns.

    Args:
        scenario: data, model, learning rates, faults.
        history: takes the record; its `arm` says how the run is protected.
        policy: of the healed run; anything `Healer` takes.
        folder: the healed run's, for its checkpoints and its events file.

    Yields:
        The number of steps done; it falls when the run goes back.
    """
    torch.set_num_threads(1)  # matrices this small lose more to the hand-over than they gain
    model = ByteTransformer(scenario)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=scenario.weight_decay, fused=True
    )
    batches, healer = range(scenario.steps), None

    with suppress(RunStopped), ExitStack() as stack:
        if history.arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state={"model": model, "optimizer": optimizer},
                    store=folder / "checkpoints",
                    events=folder / "events.jsonl",
                    save_every=SAVE_EVERY,
                )
            )
        heal = healing_of(optimizer)  # the record wants to know more than training does
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            rate = scenario.learning_rate(step)
            for group in optimizer.param_groups:
                group["lr"] = rate
            batch = scenario.training_batch(index)

            optimizer.zero_grad()
            loss = model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights))
            loss.backward()
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            if history.arm == "fixed clip":
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), FIXED_CLIP, norm)
            if healer:
                healer.observe(loss)  # <- healcore
            optimizer.step()

            history.record(
                step,
                batch=index,
                loss=loss.detach(),
                grad_norm=norm,
                learning_rate=rate,
                decision=heal.decision if heal else None,
            )
            yield step + 1

    batch = scenario.held_out_batch()
    with torch.no_grad():
        loss = model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights))
    history.finish(loss)
