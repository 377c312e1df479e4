"""A byte-level transformer in Flax: rotary attention and a GELU MLP, without normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from healcore.demo.scenario import BlockWeights, Scenario


class Block(nnx.Module):
    """Attention and MLP on a residual stream."""

    def __init__(self, weights: BlockWeights, heads: int) -> None:
        self.heads = heads
        self.qkv = nnx.Param(jnp.asarray(weights.qkv))
        self.out = nnx.Param(jnp.asarray(weights.out))
        self.up = nnx.Param(jnp.asarray(weights.up))
        self.down = nnx.Param(jnp.asarray(weights.down))

    def __call__(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        """(batch, time, width) to the same."""
        batch, time, width = x.shape
        q, k, v = (
            part.reshape(batch, time, self.heads, -1)
            for part in jnp.split(x @ self.qkv[...], 3, axis=-1)
        )
        q, k = _rotate(q, cos, sin), _rotate(k, cos, sin)
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.reshape(batch, time, width) @ self.out[...]
        return x + jax.nn.gelu(x @ self.up[...], approximate=True) @ self.down[...]


class ByteTransformer(nnx.Module):
    """Predicts the next byte."""

    def __init__(self, scenario: Scenario) -> None:
        weights = scenario.initial_weights()
        self.embed = nnx.Param(jnp.asarray(weights.embed))
        self.blocks = nnx.List([Block(block, scenario.heads) for block in weights.blocks])
        self.head = nnx.Param(jnp.asarray(weights.head))
        cos, sin = scenario.rotations()
        self.cos = nnx.Variable(jnp.asarray(cos))
        self.sin = nnx.Variable(jnp.asarray(sin))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Tokens (batch, time) to logits (batch, time, 256)."""
        x = self.embed[tokens]
        for block in self.blocks:
            x = block(x, self.cos[...], self.sin[...])
        return x @ self.head[...]

    def loss(self, tokens: jax.Array, weights: jax.Array) -> jax.Array:
        """Mean cross-entropy in nats over the targets that count; NaN if none does."""
        logits = self(tokens[:, :-1])
        each = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return jnp.sum(each * weights) / jnp.sum(weights)


def _rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotary position embedding of (batch, time, heads, width / heads)."""
    a, b = jnp.split(x, 2, axis=-1)
    cos, sin = cos[:, None, :], sin[:, None, :]
    return jnp.concatenate((a * cos - b * sin, a * sin + b * cos), axis=-1)
