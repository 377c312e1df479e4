"""The demo in torch: the model, and the training loop as a user would write it.

The lines of the loop that use healcore are marked.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from healcore import Checkpoints, Healer, Logging, RunStopped  # <- healcore
from healcore.demo_runs import FIXED_CLIP, SAVE_EVERY, Scenario, Step, TokenBatch


def train(
    scenario: Scenario, arm: str, policy: Any, folder: Path, on_step: Callable[[Step], object]
) -> float:
    """Trains one model, calls `on_step` after each step, and returns the held-out loss.

    Args:
        scenario: the data, the model's size and the faults of the run.
        arm: "healed", "fixed clip", or any other name for a run without either.
        policy: the policy of the healed run.
        folder: where the healed run writes checkpoints and events.
        on_step: called with each step. A rollback decreases the step's number.

    Returns:
        The loss on the held-out batch in nats, which may be NaN.
    """
    torch.set_num_threads(1)  # for such small matrices more threads are slower
    initial = scenario.initial_weights().items()
    model = nn.ParameterDict({name: nn.Parameter(torch.tensor(w)) for name, w in initial})
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=scenario.weight_decay, fused=True
    )
    batches = range(scenario.steps)
    healer = None

    def loss_fn(index: int) -> Tensor:
        return loss_of(model, scenario.training_batch(index), scenario)

    with suppress(RunStopped), ExitStack() as stack:
        if arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state={"model": model, "optimizer": optimizer},
                    store=folder / "checkpoints",
                    logging=Logging(events=folder / "events.jsonl"),
                    loss_fn=loss_fn,
                    checkpoints=Checkpoints(every=SAVE_EVERY),
                )
            )
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            for group in optimizer.param_groups:
                group["lr"] = scenario.learning_rate(step)

            optimizer.zero_grad()
            loss = healer.loss(index) if healer else loss_fn(index)  # <- healcore
            loss.backward()
            norm = torch.nn.utils.get_total_norm(
                [p.grad for p in model.parameters() if p.grad is not None]
            )
            if arm == "fixed clip":
                torch.nn.utils.clip_grads_with_norm_(model.parameters(), FIXED_CLIP, norm)
            optimizer.step()
            on_step(Step(step, index, loss.item(), norm.item()))

    with torch.no_grad():
        return loss_of(model, scenario.held_out_batch(), scenario).item()


def loss_of(weights: nn.ParameterDict, batch: TokenBatch, scenario: Scenario) -> Tensor:
    """Mean cross-entropy of a transformer of bytes over the targets that count, in nats.

    The transformer has rotary attention and a GELU MLP, without normalisation. Its initial weights
    come from the scenario, so all runs of the demo begin alike.

    Args:
        weights: the parameters by name.
        batch: the tokens, and the weight of each target.
        scenario: has the sizes of the model.

    Returns:
        0-d tensor; NaN without a target that counts.
    """
    tokens = torch.from_numpy(batch.tokens)
    cos, sin = map(torch.tensor, scenario.rotations())

    def rotated(x: Tensor) -> Tensor:
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)

    x = weights["embed"][tokens[:, :-1]]
    for layer in range(scenario.layers):
        heads = (x @ weights[f"qkv{layer}"]).unflatten(-1, (3 * scenario.heads, -1))
        q, k, v = heads.transpose(1, 2).chunk(3, dim=1)
        mixed = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2) @ weights[f"out{layer}"]
        up = F.gelu(x @ weights[f"up{layer}"], approximate="tanh")
        x = x + up @ weights[f"down{layer}"]
    logits = x @ weights["head"]
    targets = tokens[:, 1:].flatten().long()
    each = F.cross_entropy(logits.flatten(0, 1), targets, reduction="none")
    counts = torch.from_numpy(batch.weights).flatten()
    return (each * counts).sum() / counts.sum()
