"""The demo's training loop in torch; everything of healcore in it is marked."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import torch

import healcore.torch  # <- healcore
from healcore.core.verdict import Action
from healcore.demo.history import FIXED_CLIP, History
from healcore.demo.scenario import Scenario
from healcore.demo.snapshots import Snapshots
from healcore.torch.demo.model import ByteTransformer


def train(scenario: Scenario, history: History, policy: Any) -> Iterator[int]:
    """Trains one model, yielding after each step so that runs can take turns.

    Args:
        scenario: data, model, learning rates, faults.
        history: takes the record; its `arm` says how the run is protected.
        policy: of the healed run; anything `healcore.torch.attach` takes.

    Yields:
        The number of steps done.
    """
    torch.set_num_threads(1)  # matrices this small lose more to the hand-over than they gain
    model = ByteTransformer(scenario)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=scenario.weight_decay, fused=True
    )
    heal = None
    if history.arm == "healed":
        heal = healcore.torch.attach(optimizer, policy)  # <- healcore
    snapshots: Snapshots[dict[str, Any]] = Snapshots()

    for step in range(scenario.steps):
        if heal and snapshots.due(step):
            snapshots.add(step, _copy(model, optimizer, heal))
        rate = scenario.learning_rate(step)
        for group in optimizer.param_groups:
            group["lr"] = rate
        batch = scenario.training_batch(step)
        tokens, weights = torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights)

        optimizer.zero_grad()
        loss = model.loss(tokens, weights)
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        if history.arm == "fixed clip":
            torch.nn.utils.clip_grads_with_norm_(model.parameters(), FIXED_CLIP, norm)
        if heal:
            heal.observe(loss)  # <- healcore
        optimizer.step()

        last = history.record(
            step,
            loss=loss.detach(),
            grad_norm=norm,
            learning_rate=rate,
            decision=heal.decision if heal else None,  # <- healcore
        )
        if heal and last:
            snapshots.observe(last.step, calm=not last.cause)
            if last.action & Action.STOP:
                history.stopped = True
                break
            if last.action & Action.ROLLBACK and (good := snapshots.go_back(last.depth)):
                model.load_state_dict(good.content["model"])
                optimizer.load_state_dict(copy.deepcopy(good.content["optimizer"]))
                heal.on_rollback(good.content["heal"])  # <- healcore
                history.went_back(step, good.step)
        yield step + 1

    batch = scenario.held_out_batch()
    with torch.no_grad():
        loss = model.loss(torch.from_numpy(batch.tokens), torch.from_numpy(batch.weights))
    history.finish(loss)


def _copy(
    model: ByteTransformer, optimizer: torch.optim.Optimizer, heal: healcore.torch.Healing
) -> dict[str, Any]:
    """Everything that the run goes on from; state_dict() alone would share the live tensors."""
    return {
        "model": copy.deepcopy(model.state_dict()),
        "optimizer": copy.deepcopy(optimizer.state_dict()),
        "heal": heal.state_dict(),
    }
