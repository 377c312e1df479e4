"""A byte-level transformer in torch: rotary attention and a GELU MLP, without normalisation."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from healcore.demo.scenario import BlockWeights, Scenario


def _parameter(array) -> nn.Parameter:
    return nn.Parameter(torch.tensor(array))


class TransformerBlock(nn.Module):
    """Attention and MLP on a residual stream."""

    def __init__(self, weights: BlockWeights, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = _parameter(weights.qkv)
        self.out = _parameter(weights.out)
        self.up = _parameter(weights.up)
        self.down = _parameter(weights.down)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        q, k, v = (
            part.view(batch, time, self.heads, -1).transpose(1, 2)
            for part in (x @ self.qkv).chunk(3, dim=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).reshape(batch, time, width) @ self.out
        return x + F.gelu(x @ self.up, approximate="tanh") @ self.down


class TorchTransformer(nn.Module):
    """Predicts the next byte."""

    cos: Tensor
    sin: Tensor

    def __init__(self, scenario: Scenario) -> None:
        super().__init__()
        weights = scenario.initial_weights()
        self.embed = _parameter(weights.embed)
        self.blocks = nn.ModuleList(
            TransformerBlock(block, scenario.heads) for block in weights.blocks
        )
        self.head = _parameter(weights.head)
        cos, sin = scenario.rotations()
        self.register_buffer("cos", torch.tensor(cos), persistent=False)
        self.register_buffer("sin", torch.tensor(sin), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens (batch, time) to logits (batch, time, 256)."""
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return x @ self.head

    def loss(self, tokens: Tensor, weights: Tensor) -> Tensor:
        """Mean cross-entropy in nats over the targets that count; NaN if none does."""
        logits = self(tokens[:, :-1])
        each = F.cross_entropy(
            logits.flatten(0, 1), tokens[:, 1:].flatten().long(), reduction="none"
        )
        return (each * weights.flatten()).sum() / weights.sum()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of (batch, heads, time, width / heads)."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)
