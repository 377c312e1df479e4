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
from healcore.demo_runs import FIXED_CLIP, SAVE_EVERY, Scenario, Step


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
    model = ByteTransformer(scenario)
    optimizer = torch.optim.AdamW(
        model.parameters(), weight_decay=scenario.weight_decay, fused=True
    )
    batches = range(scenario.steps)
    healer = None

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
            on_step(Step(step, index, loss.item(), norm.item()))

    tokens, weights = scenario.held_out_batch()
    with torch.no_grad():
        return model.loss(torch.from_numpy(tokens), torch.from_numpy(weights)).item()


class ByteTransformer(nn.Module):
    """Predicts the next byte: rotary attention and a GELU MLP, without normalisation.

    The initial weights come from the scenario, so all runs of the demo begin alike. They are
    parameters by name in `weights`.
    """

    cos: Tensor
    sin: Tensor

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        self.layers, self.heads = scenario.layers, scenario.heads
        self.weights = nn.ParameterDict()
        for name, array in scenario.initial_weights().items():
            self.weights[name] = nn.Parameter(torch.tensor(array))
        cos, sin = scenario.rotations()
        self.register_buffer("cos", torch.tensor(cos), persistent=False)
        self.register_buffer("sin", torch.tensor(sin), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Predicts the next byte at each place.

        Args:
            tokens: bytes, shape (batch, time).

        Returns:
            Logits, float32, shape (batch, time, 256).
        """
        w = self.weights
        x = w["embed"][tokens]
        batch, time, width = x.shape
        for layer in range(self.layers):
            q, k, v = (
                part.view(batch, time, self.heads, -1).transpose(1, 2)
                for part in (x @ w[f"qkv{layer}"]).chunk(3, dim=-1)
            )
            q, k = self._rotate(q), self._rotate(k)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + mixed.transpose(1, 2).reshape(batch, time, width) @ w[f"out{layer}"]
            x = x + F.gelu(x @ w[f"up{layer}"], approximate="tanh") @ w[f"down{layer}"]
        return x @ w["head"]

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean cross-entropy over the targets that count, in nats.

        Args:
            tokens: bytes, shape (batch, time + 1). Each byte but the first is a target.
            weights: 1 for a target that counts, otherwise 0; batch * time elements.

        Returns:
            0-d tensor; NaN without a target that counts.
        """
        logits = self(tokens[:, :-1])
        each = F.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten().long(), reduction="none"
        )
        return (each * weights.flatten()).sum() / weights.sum()

    def _rotate(self, x: Tensor) -> Tensor:
        """Rotary position embedding of (batch, heads, time, width / heads)."""
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * self.cos - b * self.sin, a * self.sin + b * self.cos), dim=-1)
