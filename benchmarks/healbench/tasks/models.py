"""Models of a few thousand parameters, data without a download, and the plain training loop."""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from benchmarks.healbench.problem import MAIN, Problem

SYMBOLS = 256
"""Number of different bytes, which are the tokens of the models of text."""
_MAX_CORPUS_BYTES = 4 * 1024 * 1024

# -- data -----------------------------------------------------------------------------------------


def seeded(seed: int) -> torch.Generator:
    """The generator of a task's data; the initial weights follow the same seed."""
    torch.manual_seed(seed)
    return torch.Generator().manual_seed(seed)


@cache
def byte_corpus() -> tuple[Tensor, Tensor]:
    """The sources of Python's standard library as (training, held-out) text, split by file.

    Returns:
        Two uint8 tensors (n,) and (m,), read once per process: do not write to them.
    """
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    size = 0
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: path.name)
    for index, path in enumerate(paths):
        text = path.read_bytes()
        size += len(text)
        if size > _MAX_CORPUS_BYTES:
            break
        parts[index % 10 == 9].append(text)
    train, held_out = (np.frombuffer(b"".join(part), np.uint8).copy() for part in parts)
    return torch.from_numpy(train), torch.from_numpy(held_out)


def text_windows(text: Tensor, rows: int, length: int, generator: torch.Generator) -> Tensor:
    """Windows of `length` + 1 bytes at random offsets: inputs and, moved on by one, targets.

    Returns:
        int64 (rows, length + 1).
    """
    starts = torch.randint(len(text) - length, (rows,), generator=generator)
    return text[starts[:, None] + torch.arange(length + 1)].long()


@cache
def held_out_windows(rows: int = 256, length: int = 32) -> Tensor:
    """The same evenly spaced windows of the held-out text for every seed and arm.

    Returns:
        int64 (rows, length + 1).
    """
    text = byte_corpus()[1]
    starts = torch.linspace(0, len(text) - length - 1, rows).long()
    return text[starts[:, None] + torch.arange(length + 1)].long()


def textured_shapes(
    rows: int, generator: torch.Generator, noise: float = 0.3
) -> tuple[Tensor, Tensor]:
    """Images of five shapes, plain or striped, at random places and sizes: ten classes.

    Args:
        rows: how many.
        generator: of places, sizes, contrasts, classes and noise.
        noise: standard deviation of the Gaussian noise on every pixel; a shape is 0.5 to 1.

    Returns:
        float32 (rows, 1, 16, 16) and int64 (rows,).
    """
    labels = torch.randint(10, (rows,), generator=generator)
    x, y, size, contrast = torch.rand(4, rows, 1, 1, generator=generator)
    grid = torch.linspace(-1, 1, 16)
    scale = 0.45 + 0.2 * size
    u = (grid[None, None, :] - 0.7 * (x - 0.5)) / scale
    v = (grid[None, :, None] - 0.7 * (y - 0.5)) / scale
    u, v = torch.broadcast_tensors(u, v)
    distance, largest = torch.hypot(u, v), torch.maximum(u.abs(), v.abs())
    shapes = torch.stack(
        [
            distance < 1,
            largest < 0.9,
            (distance > 0.55) & (distance < 1.1),
            (torch.minimum(u.abs(), v.abs()) < 0.35) & (largest < 1),
            (torch.minimum((u - v).abs(), (u + v).abs()) < 0.45) & (largest < 1),
        ]
    )
    shape = shapes[labels % 5, torch.arange(rows)]
    stripes = torch.cos(7 * (u + v)) > 0
    image = (shape & (stripes | (labels < 5)[:, None, None])) * (0.5 + 0.5 * contrast)
    image = image + noise * torch.randn(image.shape, generator=generator)
    return image[:, None], labels


def friedman(rows: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Friedman's first regression problem (1991), ten features of which five matter, no noise.

    Returns:
        Features float32 (rows, 10), about unit variance, and the standardised function (rows,).
    """
    x = torch.rand(rows, 10, generator=generator)
    y = 10 * torch.sin(math.pi * x[:, 0] * x[:, 1]) + 20 * (x[:, 2] - 0.5) ** 2
    y = y + 10 * x[:, 3] + 5 * x[:, 4]
    return (x - 0.5) * math.sqrt(12), (y - 14.4) / 4.9


class RowBatches(Sequence[tuple[Tensor, ...]]):
    """Batch i is the rows `rows[i]` of each tensor.

    Args:
        rows: int64 (steps, batch size).
        tensors: each (rows, ...).
    """

    def __init__(self, rows: Tensor, *tensors: Tensor) -> None:
        self.rows = rows
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def __getitem__(self, i: int) -> tuple[Tensor, ...]: ...

    @overload
    def __getitem__(self, i: slice) -> RowBatches: ...

    def __getitem__(self, i: int | slice) -> tuple[Tensor, ...] | RowBatches:
        if isinstance(i, slice):
            return RowBatches(self.rows[i], *self.tensors)
        return tuple(tensor[self.rows[i]] for tensor in self.tensors)


def epochs(rows: int, steps: int, batch_size: int, generator: torch.Generator) -> Tensor:
    """Which rows each step sees: shuffled epochs, the incomplete last batch dropped.

    Returns:
        int64 (steps, batch_size).
    """
    per_epoch = rows // batch_size
    orders = [
        torch.randperm(rows, generator=generator)[: per_epoch * batch_size]
        for _ in range(math.ceil(steps / per_epoch))
    ]
    return torch.cat(orders)[: steps * batch_size].view(steps, batch_size)


# -- the loop ---------------------------------------------------------------------------------


def plain_loop(
    model: nn.Module,
    loss: Callable[[Any], Tensor],
    batches: Sequence[Any],
    optimizer: Optimizer,
    evaluate: Callable[[], float],
    scheduler: LRScheduler | None = None,
) -> Problem:
    """One model, one optimizer, one loss per batch; `evaluate` runs in eval mode without grad."""

    def loss_fn(batch: Any) -> Tensor:
        # BatchNorm writes its statistics in a forward pass: it gets copies to write to.
        kept = [(module, dict(module._buffers)) for module in model.modules()]
        for module, buffers in kept:
            module._buffers.update({k: b.clone() for k, b in buffers.items() if b is not None})
        try:
            return loss(batch)
        finally:
            for module, buffers in kept:
                module._buffers.update(buffers)

    @torch.no_grad()
    def in_eval_mode() -> float:
        model.eval()
        try:
            return evaluate()
        finally:
            model.train()

    return Problem(
        modules={"model": model},
        optimizers={MAIN: optimizer},
        batches=batches,
        step=lambda batch, update: update(loss(batch)),
        evaluate=in_eval_mode,
        schedulers={MAIN: scheduler} if scheduler is not None else {},
        loss_fn=loss_fn,
    )


# -- learning rates -------------------------------------------------------------------------------


def warmup_cosine(
    optimizer: Optimizer, steps: int, warmup: int = 0, floor: float = 0.0
) -> LambdaLR:
    """Linear warm-up over `warmup` steps, then half a cosine down to `floor` times the rate."""

    def factor(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        progress = min(1.0, (step - warmup) / max(1, steps - warmup))
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * progress))

    return LambdaLR(optimizer, factor)


# -- models ---------------------------------------------------------------------------------------


def mlp(
    *widths: int, activation: Callable[[], nn.Module] = nn.ReLU, norm: bool = False
) -> nn.Sequential:
    """Linear layers of the given widths with an activation between them.

    Args:
        widths: input, hidden ..., output.
        activation: after every layer but the last.
        norm: LayerNorm before each activation.
    """
    layers: list[nn.Module] = []
    for i, (wide, out) in enumerate(pairwise(widths)):
        layers.append(nn.Linear(wide, out))
        if i < len(widths) - 2:
            layers += [nn.LayerNorm(out), activation()] if norm else [activation()]
    return nn.Sequential(*layers)


def small_cnn(classes: int = 10, channels: int = 1, width: int = 8) -> nn.Sequential:
    """Two stages of convolution, BatchNorm and ReLU at strides of 2, then average and a head.

    Args:
        classes: outputs.
        channels: of the images, (batch, channels, height, width).
        width: channels of the first stage; the second has twice as many.
    """
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(2 * width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * width, classes),
    )


class _Block(nn.Module):
    """Causal self-attention and an MLP, each added to the residual stream."""

    def __init__(self, width: int, heads: int, norm: bool) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width) if norm else nn.Identity()
        self.norm_mlp = nn.LayerNorm(width) if norm else nn.Identity()
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.mlp = mlp(width, 4 * width, width, activation=nn.GELU)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, width = x.shape
        qkv = self.qkv(self.norm_attention(x)).view(rows, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.norm_mlp(x))


class ByteModel(nn.Module):
    """Next-byte model: a small pre-norm transformer, or a GRU.

    Args:
        width: of the residual stream or of the GRU's state.
        layers: transformer blocks or GRU layers.
        heads: of the attention.
        context: longest input.
        kind: architecture.
        norm: LayerNorms of the transformer; without them a high learning rate diverges.
    """

    def __init__(
        self,
        width: int = 32,
        layers: int = 2,
        heads: int = 2,
        context: int = 64,
        kind: Literal["transformer", "gru"] = "transformer",
        norm: bool = True,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(SYMBOLS, width)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.head = nn.Linear(width, SYMBOLS)
        self.gru: nn.GRU | None = None
        if kind == "gru":
            self.gru = nn.GRU(width, width, layers, batch_first=True)
            return
        self.position = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(_Block(width, heads, norm) for _ in range(layers)))
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()

    def forward(self, text: Tensor) -> Tensor:
        """Scores of the byte after each of `text`.

        Args:
            text: int64 (batch, length).

        Returns:
            float32 (batch, length, SYMBOLS).
        """
        x = self.embedding(text)
        if self.gru is not None:
            return self.head(self.gru(x)[0])
        return self.head(self.norm(self.blocks(x + self.position[: text.shape[1]])))

    def loss(self, windows: Tensor) -> Tensor:
        """Mean cross entropy in nats per byte on windows of inputs and one more byte.

        Args:
            windows: int64 (batch, length + 1), as `text_windows` gives them.
        """
        scores = self(windows[:, :-1])
        return F.cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
