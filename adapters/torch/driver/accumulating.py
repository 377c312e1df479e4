"""Whether gradients of a step not yet taken lie in `.grad`.

That there are gradients says nothing: many loops clear them only before the next backward. So one
hook of one parameter notes that a backward has reached the optimizer, and another that it stepped.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.torch import gradients
from healcore.torch.healing import Healing


class Accumulation:
    """Watches one optimizer.

    Args:
        healing: its handle, which knows of losses reported since the last step: for wrappers that
            write `.grad` past autograd.
    """

    def __init__(self, healing: Healing) -> None:
        self._healing = healing
        self._reached = False
        self.stepped = False
        """Whether the optimizer has stepped; whoever reads it sets it back."""
        # Disabled as Healing's own hooks are: not to be traced into somebody's compiled step.
        stepped: Any = torch.compiler.disable(self._stepped)
        self._hook: Any = torch.compiler.disable(self._backward)
        self._stepping = healing.optimizer.register_step_post_hook(stepped)
        self._watched: Tensor | None = None
        self._watching: Any = None
        self._watch()

    @property
    def under_way(self) -> bool:
        """Whether there are gradients that the optimizer has not stepped with."""
        self._watch()
        if not (self._reached or self._healing.has_loss):
            return False
        return any(p.grad is not None for p in self._params)

    def clear(self) -> None:
        """Throws the gradients away."""
        for p in self._params:
            p.grad = None
        self._reached = False

    def close(self) -> None:
        """Takes the hooks off."""
        self._stepping.remove()
        if self._watching is not None:
            self._watching.remove()

    @property
    def _params(self) -> list[Tensor]:
        return gradients.parameters(self._healing.optimizer)

    def _watch(self) -> None:
        """Puts the hook on a parameter that takes part; the one before may have been frozen."""
        if self._watched is not None and self._watched.requires_grad:
            return
        found = next((p for p in self._params if p.requires_grad and p.is_leaf), None)
        if found is None:
            return  # all frozen, for the other network's turn: the old one will do
        if self._watching is not None:
            self._watching.remove()
        self._watched = found
        self._watching = found.register_post_accumulate_grad_hook(self._hook)

    def _backward(self, _: Tensor) -> None:
        self._reached = True

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._reached, self.stepped = False, True
        self._watch()
