"""An error about shapes is named, with the layer and the line that raised it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from torch import nn

from healcore.runtime.faults.shapes import shape_diagnosis


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


RAISING: dict[str, Callable[[], Any]] = {
    "linear": lambda: Net()(torch.ones(4, 5)),
    "add": lambda: torch.ones(3) + torch.ones(4),
    "cat": lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4, 5)]),
    "cat of two widths": lambda: torch.cat([torch.ones(2, 3), torch.ones(2, 4)]),
    "stack": lambda: torch.stack([torch.ones(2), torch.ones(3)]),
    "view": lambda: torch.ones(6).view(4, 2),
    "expand": lambda: torch.ones(3).expand(4, 5),
    "convolution": lambda: nn.Conv1d(2, 3, 1)(torch.ones(1, 5, 4)),
    "layer norm": lambda: nn.LayerNorm(3)(torch.ones(2, 4)),
    "batch norm": lambda: nn.BatchNorm1d(3)(torch.ones(2, 4)),
    "cross entropy": lambda: nn.functional.cross_entropy(torch.ones(3, 2), torch.tensor([1])),
    "target": lambda: nn.functional.binary_cross_entropy(torch.ones(3), torch.ones(2)),
    "bmm": lambda: torch.bmm(torch.ones(1, 2, 3), torch.ones(2, 2, 3)),
    "jax matmul": lambda: jnp.ones((2, 3)) @ jnp.ones((4, 2)),
    "jax add": lambda: jnp.ones(3) + jnp.ones(4),
    "jax reshape": lambda: jnp.ones(6).reshape(4, 2),
    "jax compiled": lambda: jax.jit(lambda x: x @ jnp.ones((4, 2)))(jnp.ones((2, 3))),
    "numpy": lambda: np.ones(3) + np.ones(4),
    "numpy matmul": lambda: np.ones((2, 3)) @ np.ones((4, 2)),
}


@pytest.mark.parametrize("kind", RAISING)
def test_errors_of_real_libraries(kind: str):
    with pytest.raises((RuntimeError, ValueError, TypeError)) as raised:
        RAISING[kind]()
    text = shape_diagnosis(raised.value)
    assert text.startswith("Shapes of tensors do not fit")
    assert "(test_shapes.py, line " in text
    if kind == "linear":
        assert "in Linear (" in text


@pytest.mark.parametrize(
    "error", [RuntimeError("the queue is full"), KeyError("shape"), ValueError("lr"), None]
)
def test_other_errors(error: BaseException | None):
    assert shape_diagnosis(error) == ""
