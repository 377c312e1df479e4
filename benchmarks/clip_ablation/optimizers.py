"""Optimizers over lanes, without weight decay except AdamW's."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

Update = Callable[[list[Tensor], list[Tensor], int], None]
"""Changes the parameters in place, given their gradients and the number of the step (from 1)."""


def sgd(parameters: list[Tensor], lr: float, momentum: float = 0.9) -> Update:
    """SGD with momentum."""
    buffers = [torch.zeros_like(p) for p in parameters]

    def update(parameters: list[Tensor], gradients: list[Tensor], step: int) -> None:
        for p, g, m in zip(parameters, gradients, buffers, strict=True):
            m.mul_(momentum).add_(g)
            p.sub_(lr * m)

    return update


def adam(
    parameters: list[Tensor], lr: float, b1: float = 0.9, b2: float = 0.999, decay: float = 0.0
) -> Update:
    """Adam; AdamW with a `decay`; RMSprop with `b1` = 0."""
    first = [torch.zeros_like(p) for p in parameters]
    second = [torch.zeros_like(p) for p in parameters]

    def update(parameters: list[Tensor], gradients: list[Tensor], step: int) -> None:
        for p, g, m, v in zip(parameters, gradients, first, second, strict=True):
            m.lerp_(g, 1 - b1)
            v.lerp_(g * g, 1 - b2)
            corrected = (v / (1 - b2**step)).sqrt_().add_(1e-8)
            p.mul_(1 - lr * decay).sub_(lr / (1 - b1**step) * m / corrected)

    return update


def lion(parameters: list[Tensor], lr: float, b1: float = 0.9, b2: float = 0.99) -> Update:
    """Lion."""
    first = [torch.zeros_like(p) for p in parameters]

    def update(parameters: list[Tensor], gradients: list[Tensor], step: int) -> None:
        for p, g, m in zip(parameters, gradients, first, strict=True):
            p.sub_(lr * torch.lerp(m, g, 1 - b1).sign_())
            m.lerp_(g, 1 - b2)

    return update


def adafactor(parameters: list[Tensor], lr: float) -> Update:
    """Adafactor: factored second moments, updates clipped at a root mean square of 1."""
    rows = [torch.zeros_like(p.mean(-1)) for p in parameters]
    columns = [torch.zeros_like(p.mean(-2)) for p in parameters]

    def update(parameters: list[Tensor], gradients: list[Tensor], step: int) -> None:
        rate = step**-0.8
        for p, g, r, c in zip(parameters, gradients, rows, columns, strict=True):
            square = g * g + 1e-30
            r.lerp_(square.mean(-1), rate)
            c.lerp_(square.mean(-2), rate)
            v = r[..., :, None] * c[..., None, :] / r.mean(-1)[..., None, None]
            u = g / v.sqrt()
            size = (u * u).flatten(1).mean(1).sqrt().clamp(min=1.0)
            p.sub_(lr * u / size.view(-1, *[1] * (u.ndim - 1)))

    return update


OPTIMIZERS: dict[str, Callable[[list[Tensor], float], Update]] = {
    "sgd": lambda p, lr: sgd(p, lr, 0.0),
    "momentum": sgd,
    "adam": adam,
    "adam_b2_95": lambda p, lr: adam(p, lr, b2=0.95),
    "adamw": lambda p, lr: adam(p, lr, decay=0.01),
    "rmsprop": lambda p, lr: adam(p, lr, b1=0.0, b2=0.99),
    "lion": lion,
    "adafactor": adafactor,
}
