"""The demo in torch: model and step. `healcore.demo_runs.train` has the loop.

Lines that use healcore are marked.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from healcore.demo_runs import FIXED_CLIP, DemoTraining, Scenario


class TorchTraining(DemoTraining):
    """A transformer in torch, with AdamW."""

    array = staticmethod(torch.as_tensor)
    concatenate = staticmethod(torch.cat)
    gelu = staticmethod(partial(F.gelu, approximate="tanh"))

    def __init__(self, scenario: Scenario, arm: str, policy: Any) -> None:
        del policy  # the Healer has it
        torch.set_num_threads(1)  # for such small matrices more threads are slower
        self.scenario, self.arm = scenario, arm
        initial = scenario.initial_weights().items()
        self.model = nn.ParameterDict({name: nn.Parameter(torch.tensor(w)) for name, w in initial})
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), weight_decay=scenario.weight_decay, fused=True
        )
        self.state = {"model": self.model, "optimizer": self.optimizer}

    @staticmethod
    def attention(*heads: Tensor) -> Tensor:
        """See `DemoTraining.attention`."""
        q, k, v = (each.transpose(1, 2) for each in heads)
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    @staticmethod
    def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
        """See `DemoTraining.cross_entropy`."""
        return F.cross_entropy(logits.transpose(1, 2), targets.long(), reduction="none")

    def loss_fn(self, index: int) -> Tensor:
        """See `DemoTraining.loss_fn`."""
        return self.loss(self.model, self.scenario.training_batch(index))

    def step(self, index: int, rate: float) -> tuple[Tensor, Tensor]:
        """See `DemoTraining.step`."""
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.zero_grad()
        loss = self.healer.loss(index) if self.healer else self.loss_fn(index)  # <- healcore
        loss.backward()
        weights = [*self.model.parameters()]
        norm = torch.nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        if self.arm == "fixed clip":
            torch.nn.utils.clip_grads_with_norm_(weights, FIXED_CLIP, norm)
        self.optimizer.step()
        return loss, norm

    def held_out_loss(self) -> float:
        """See `DemoTraining.held_out_loss`."""
        with torch.no_grad():
            return self.loss(self.model, self.scenario.held_out_batch()).item()
