"""Small problems over lanes: parameters and data begin with the axis of the seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable

import torch
from torch import Tensor

Batch = tuple[Tensor, Tensor, Tensor]
"""Inputs (seeds, rows, d), targets (seeds, rows, o), and a factor on the loss of each seed."""


@dataclasses.dataclass
class Problem:
    """Data and model."""

    parameters: list[Tensor]
    batch: Callable[[int], Batch]
    forward: Callable[[list[Tensor], Tensor], Tensor]
    error: Callable[[Tensor, Tensor], Tensor]
    """Output and targets -> error of each row, (lanes, rows)."""
    tests: list[tuple[float, Batch]]
    """Share of the test and its data."""


def squared(output: Tensor, target: Tensor) -> Tensor:
    """Mean squared error."""
    return ((output - target) ** 2).mean(-1)


def summed(output: Tensor, target: Tensor) -> Tensor:
    """A sum in place of a mean."""
    return 50 * ((output - target) ** 2).sum(-1)


def cross_entropy(output: Tensor, target: Tensor) -> Tensor:
    """Cross-entropy with a distribution as the target."""
    return -(target * output.log_softmax(-1)).sum(-1)


def _weights(g: torch.Generator, seeds: int, sizes: tuple[int, ...], gain: float) -> list[Tensor]:
    parameters = []
    for a, b in itertools.pairwise(sizes):
        parameters.append(gain * torch.randn(seeds, a, b, generator=g) / math.sqrt(a))
        parameters.append(torch.zeros(seeds, 1, b))
    return parameters


def mlp(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Tanh between linear layers."""
    for w, b in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = torch.tanh(x @ w + b)
    return x @ parameters[-2] + parameters[-1]


def rectified(parameters: list[Tensor], x: Tensor) -> Tensor:
    """ReLU between linear layers."""
    for w, b in zip(parameters[:-2:2], parameters[1:-2:2], strict=True):
        x = torch.relu(x @ w + b)
    return x @ parameters[-2] + parameters[-1]


def linear(parameters: list[Tensor], x: Tensor) -> Tensor:
    """Nothing between linear layers."""
    for w, b in zip(parameters[::2], parameters[1::2], strict=True):
        x = x @ w + b
    return x


def attention(parameters: list[Tensor], x: Tensor) -> Tensor:
    """One block of attention and one of an MLP on rows of 6 tokens; the last token's output."""
    embed, _, qkv, _, up, _, down, _, out, bias = parameters
    lanes, rows, _ = x.shape
    h = (x.view(lanes, rows * 6, -1) @ embed).view(lanes, rows, 6, -1)
    q, k, v = (_norm(h).flatten(1, 2) @ qkv).view(lanes, rows, 6, -1).chunk(3, -1)
    mixed = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5, -1) @ v
    h = (h + mixed)[:, :, -1]
    h = h + torch.relu(_norm(h) @ up) @ down
    return _norm(h) @ out + bias


def recurrent(parameters: list[Tensor], x: Tensor) -> Tensor:
    """A plain recurrent net over 12 steps."""
    into, bias, within, _, out, last = parameters
    h = torch.zeros(x.shape[0], x.shape[1], within.shape[-1])
    for part in x.chunk(12, -1):
        h = torch.tanh(part @ into + h @ within + bias)
    return h @ out + last


def _norm(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


MODELS: dict[str, tuple[Callable[[list[Tensor], Tensor], Tensor], tuple[tuple[int, ...], ...]]] = {
    "tanh": (mlp, ((10, 32, 32, 4),)),
    "relu": (rectified, ((10, 32, 32, 4),)),
    "linear": (linear, ((10, 16, 16, 16, 4),)),
    "attention": (attention, ((10, 16), (16, 48), (16, 32), (32, 16), (16, 4))),
    "recurrent": (recurrent, ((10, 24), (24, 24), (24, 4))),
}
INPUTS = {"attention": 60, "recurrent": 120}


@dataclasses.dataclass(frozen=True)
class Data:
    """What the batches are."""

    shares: tuple[float, ...] = (1.0,)
    """Probability of each source."""
    weights: tuple[float, ...] = (1.0,)
    """Factor on the loss of each source."""
    scales: tuple[float, ...] = (1.0,)
    """Factor on the targets of each source."""
    balanced: bool = False
    """The test weighs sources alike instead of by share and weight."""
    block: int = 1
    """Batches of one source in a row; with more than 1, sources take turns."""
    rows: int = 32
    """Rows of a batch; with `fixed` of all data."""
    fixed: bool = False
    """Every batch is all data."""
    noise: float = 0.1
    """Standard deviation of the targets' noise."""
    tails: float = 0.0
    """Degrees of freedom of Student's noise; 0 for normal noise."""
    kind: str = "regression"
    """Or classes."""
    zeros: float = 0.0
    """Probability that a row's targets are 0; the others are log-normal."""
    growth: float = 1.0
    """Factor on the targets from the first step to the last (a growing scale)."""
    init: float = 1.0
    """Gain of the initial weights."""


def problem(
    g: torch.Generator, seeds: int, model: str, data: Data, error: Callable, steps: int
) -> Problem:
    """Builds the problem of one task."""
    forward, shapes = MODELS[model]
    parameters = [p for sizes in shapes for p in _weights(g, seeds, sizes, data.init)]
    width = INPUTS.get(model, 10)
    count = len(data.shares)
    teachers = [
        [
            torch.randn(seeds, width, 16, generator=g) / width**0.5 * 1.5,
            torch.randn(seeds, 16, 4, generator=g) / 4,
        ]
        for _ in range(count)
    ]

    def rows(source: int, n: int, noisy: bool) -> Batch:
        x = torch.randn(seeds, n, width, generator=g)
        if count > 1:
            x[..., 0] = 2.0 * source - (count - 1)
        w, v = teachers[source]
        y = torch.tanh(x @ w) @ v * data.scales[source]
        if data.kind == "classes":
            y = torch.nn.functional.one_hot((4 * y).argmax(-1), 4).float()
        elif data.zeros:
            y = torch.exp(2.0 * y)
            if noisy:
                y = y * (torch.rand(seeds, n, 1, generator=g) > data.zeros) / (1 - data.zeros)
        if noisy and data.noise:
            e = torch.randn(y.shape, generator=g)
            if data.tails:
                chi = torch.randn(*y.shape, 3, generator=g).square().sum(-1) / 3
                e = e / chi ** (1.5 / data.tails)
            y = y + data.noise * data.scales[source] * e
        return x, y, torch.full((seeds,), data.weights[source])

    everything = rows(0, data.rows, noisy=True) if data.fixed else None

    def batch(step: int) -> Batch:
        if everything is not None:
            return everything
        if count == 1:
            x, y, weight = rows(0, data.rows, noisy=True)
            return x, y * data.growth ** (step / steps), weight
        options = [rows(source, data.rows, noisy=True) for source in range(count)]
        if data.block > 1:
            return options[step // data.block % count]
        u = torch.rand(seeds, generator=g)
        x, y, weight = options[0]
        edge = data.shares[0]
        for option, share in zip(options[1:], data.shares[1:], strict=True):
            chosen = u >= edge
            x = torch.where(chosen[:, None, None], option[0], x)
            y = torch.where(chosen[:, None, None], option[1], y)
            weight = torch.where(chosen, option[2], weight)
            edge += share
        return x, y, weight

    tests = []
    for source in range(count):
        share = 1 / data.weights[source] if data.balanced else data.shares[source]
        test = everything or rows(source, 256, noisy=bool(data.zeros))
        tests.append((share, (test[0], test[1] * data.growth, test[2])))
    return Problem(parameters, batch, forward, error, tests)
