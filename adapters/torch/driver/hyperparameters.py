"""Hyper-parameters that are tensors keep their tensor over a `load_state_dict`.

torch puts a new one in its place, on the host where the checkpoint came from there: a captured
graph would go on reading the old one, and a capturable optimizer refuses the new one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class TensorOptions:
    """The tensors among an optimizer's options (`lr`, `betas`), as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._held = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def put_back(self) -> None:
        """Writes the loaded values into the old tensors."""
        for group, held in zip(self._optimizer.param_groups, self._held, strict=True):
            for name, old in held.items():
                if name in group:
                    group[name] = _kept(old, group[name])


def _kept(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        old.detach().copy_(new)
        return old
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return tuple(_kept(a, b) for a, b in zip(old, new, strict=True))
    return new
