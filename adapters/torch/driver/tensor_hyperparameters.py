"""Hyperparameters that are tensors keep their tensor through a `load_state_dict`.

torch replaces it by a new tensor, on the host if the checkpoint was there: a captured graph would
go on reading the old one, and a capturable optimizer rejects the new one.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


class TensorHyperparameters:
    """The tensors among an optimizer's hyperparameters (`lr`, `betas`), as they are now."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._originals = [
            {name: value for name, value in group.items() if name != "params"}
            for group in optimizer.param_groups
        ]

    def restore(self) -> None:
        """Writes the loaded values into the old tensors."""
        for group, originals in zip(self._optimizer.param_groups, self._originals, strict=True):
            for name, old in originals.items():
                if name in group:
                    group[name] = _kept(old, group[name])


def _kept(old: Any, new: Any) -> Any:
    if isinstance(old, Tensor) and isinstance(new, Tensor) and old.shape == new.shape:
        old.detach().copy_(new)
        return old
    if isinstance(old, tuple) and isinstance(new, tuple) and len(old) == len(new):
        return tuple(_kept(a, b) for a, b in zip(old, new, strict=True))
    return new
