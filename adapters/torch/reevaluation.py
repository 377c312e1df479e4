"""Undoing a step of an optimizer that evaluates its closure again after moving the parameters.

L-BFGS evaluates once, which healcore judges like any other step, then moves and evaluates again,
up to twenty times. Should a later evaluation be non-finite, the parameters have already moved:
the only exact skip left is to go back.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import LBFGS, Optimizer


class Undo:
    """Parameters and state of an L-BFGS before a step; empty for every other optimizer."""

    def __init__(self) -> None:
        self._params: list[tuple[Tensor, Tensor]] = []
        self._state: dict[Any, dict[str, Any]] = {}

    @staticmethod
    def applies(optimizer: Optimizer) -> bool:
        """Whether this optimizer may have to be undone."""
        return isinstance(optimizer, LBFGS)

    def record(self, optimizer: Optimizer) -> None:
        """Copies what `back` restores; call it before the first evaluation."""
        self._params = [
            (p, p.detach().clone()) for g in optimizer.param_groups for p in g["params"]
        ]
        self._state = {p: _copied(state) for p, state in optimizer.state.items()}

    def back(self, optimizer: Optimizer) -> None:
        """Restores parameters and state, if any were recorded."""
        if not self._params:
            return
        for p, value in self._params:
            p.detach().copy_(value)
        optimizer.state.clear()
        optimizer.state.update(self._state)
        self.forget()

    def forget(self) -> None:
        """Frees the copies."""
        self._params, self._state = [], {}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    """One level deep: L-BFGS appends to its lists and writes into its tensors, not into theirs."""
    copied: dict[str, Any] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            copied[key] = value.clone()
        else:
            copied[key] = list(value) if isinstance(value, list) else value
    return copied
