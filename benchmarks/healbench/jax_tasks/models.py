"""The models of the torch side (tasks/models.py) as functions of their parameters, and losses.

Parameters are a flat dictionary by the names of the torch modules. A loss returns the BatchNorm
statistics of its batch with its value: by the names of the running ones, {} without BatchNorm.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array, lax

Arrays = dict[str, Array]
Activation = Callable[[Array], Array]

_EPS = 1e-5  # of the normalisations, torch's default

# -- layers ----------------------------------------------------------------------------------------


def linear(params: Arrays, name: str, x: Array) -> Array:
    """`nn.Linear`, with a bias if there is one."""
    product = x @ params[f"{name}.weight"].T
    bias = params.get(f"{name}.bias")
    return product if bias is None else product + bias


def layer_norm(params: Arrays, name: str, x: Array) -> Array:
    """`nn.LayerNorm` over the last axis; nothing where the model has none by this name."""
    if f"{name}.weight" not in params:
        return x
    centred = x - x.mean(-1, keepdims=True)
    scaled = centred * lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + _EPS)
    return scaled * params[f"{name}.weight"] + params[f"{name}.bias"]


def batch_norm(params: Arrays, name: str, x: Array) -> tuple[Array, Arrays]:
    """`nn.BatchNorm2d` in training mode, and the statistics of this batch."""
    axes = (0, 2, 3)
    mean, variance = x.mean(axes), x.var(axes)
    count = x.size // x.shape[1]
    scale = params[f"{name}.weight"] * lax.rsqrt(variance + _EPS)
    shift = params[f"{name}.bias"] - mean * scale
    seen = {
        f"{name}.running_mean": mean,
        f"{name}.running_var": variance * (count / (count - 1)),
    }
    return x * scale[:, None, None] + shift[:, None, None], seen


def mlp(
    params: Arrays,
    x: Array,
    prefix: str = "",
    *,
    layers: int = 3,
    activation: Activation = jax.nn.relu,
    norm: bool = False,
) -> Array:
    """Linear layers with an activation between them, LayerNorm before it if asked.

    Args:
        params: of the model.
        x: (..., inputs).
        prefix: of the names, with its dot.
        layers: linear ones.
        activation: after every layer but the last.
        norm: as the torch `mlp` was made.
    """
    stride = 3 if norm else 2  # in nn.Sequential each activation and each norm has a number too
    for number in range(0, stride * layers, stride):
        if number:
            x = activation(x)
        x = linear(params, f"{prefix}{number}", x)
        x = layer_norm(params, f"{prefix}{number + 1}", x) if norm else x
    return x


def small_cnn(params: Arrays, images: Array, prefix: str = "") -> tuple[Array, Arrays]:
    """Two stages of convolution, BatchNorm and ReLU, average pooling to 2 x 2, and a head."""
    x, seen = images, {}
    for conv, norm in ((0, 1), (3, 4)):
        weight = params[f"{prefix}{conv}.weight"]
        x = lax.conv_general_dilated(x, weight, (2, 2), [(1, 1), (1, 1)])
        x, of_batch = batch_norm(params, f"{prefix}{norm}", x)
        x = jax.nn.relu(x)
        seen |= of_batch
    rows, channels, height, width = x.shape
    x = x.reshape(rows, channels, 2, height // 2, 2, width // 2).mean((3, 5))
    return linear(params, f"{prefix}8", x.reshape(rows, -1)), seen


def _attention(params: Arrays, name: str, x: Array, heads: int) -> Array:
    rows, length, width = x.shape
    qkv = linear(params, f"{name}.qkv", x).reshape(rows, length, 3, heads, -1)
    q, k, v = jnp.moveaxis(qkv, 2, 0)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / (width // heads) ** 0.5
    scores = jnp.where(jnp.tri(length, dtype=bool), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return linear(params, f"{name}.out", mixed.reshape(rows, length, width))


def byte_model(params: Arrays, text: Array, heads: int = 2) -> Array:
    """The transformer of `ByteModel`: scores of the byte after each of `text` (batch, length)."""
    x = params["embedding.weight"][text] + params["position"][: text.shape[1]]
    block = 0
    while f"blocks.{block}.qkv.weight" in params:
        name = f"blocks.{block}"
        x += _attention(params, name, layer_norm(params, f"{name}.norm_attention", x), heads)
        inside = layer_norm(params, f"{name}.norm_mlp", x)
        x += mlp(params, inside, f"{name}.mlp.", layers=2, activation=_gelu)
        block += 1
    return linear(params, "head", layer_norm(params, "norm", x))


def _gelu(x: Array) -> Array:
    return jax.nn.gelu(x, approximate=False)


# -- losses ----------------------------------------------------------------------------------------


def cross_entropies(scores: Array, labels: Array) -> Array:
    """One per label, in nats."""
    return optax.softmax_cross_entropy_with_integer_labels(scores, labels)


def next_byte(params: Arrays, windows: Array) -> tuple[Array, Arrays]:
    """The loss of `byte_model` on windows (batch, length + 1), in nats per byte."""
    return cross_entropies(byte_model(params, windows[:, :-1]), windows[:, 1:]).mean(), {}


def classification(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """The loss of an MLP with three layers on inputs and labels."""
    inputs, labels = batch
    return cross_entropies(mlp(params, inputs), labels).mean(), {}


def squared_errors(params: Arrays, batch: Any, activation: Activation = jax.nn.relu) -> Array:
    """The loss of an MLP with three layers on the last inputs and targets of a batch; one each."""
    *_, inputs, targets = batch
    outputs = mlp(params, inputs, activation=activation)
    return jnp.square(outputs.reshape(targets.shape) - targets)


def regression(params: Arrays, batch: Any) -> tuple[Array, Arrays]:
    """Mean squared error of a ReLU network."""
    return squared_errors(params, batch).mean(), {}
