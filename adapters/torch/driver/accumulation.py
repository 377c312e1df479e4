"""`Accumulation`: whether `.grad` holds gradients that the optimizer has not stepped with.

Gradients alone do not show that: many loops clear them only before the next backward. So a hook on
one parameter notes that a backward pass has reached it, and a hook on the optimizer its step.
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
        healing: its handle, which knows the losses observed since the last step: for wrappers that
            write `.grad` without autograd.
    """

    def __init__(self, healing: Healing) -> None:
        self._healing = healing
        self._reached = False
        self.stepped = False
        """Whether the optimizer has stepped; the reader resets it."""
        # Disabled like Healing's own hooks: they must not be traced into a compiled step.
        on_step: Any = torch.compiler.disable(self._on_step)
        self._backward_hook: Any = torch.compiler.disable(self._on_backward)
        self._step_handle = healing.optimizer.register_step_post_hook(on_step)
        self._watched: Tensor | None = None
        self._backward_handle: Any = None
        self._watch()

    @property
    def in_progress(self) -> bool:
        """Whether there are gradients that the optimizer has not stepped with."""
        self._watch()
        if not (self._reached or self._healing.has_loss):
            return False
        return any(p.grad is not None for p in self._params)

    def clear(self) -> None:
        """Drops the gradients."""
        for p in self._params:
            p.grad = None
        self._reached = False

    def close(self) -> None:
        """Removes the hooks."""
        self._step_handle.remove()
        if self._backward_handle is not None:
            self._backward_handle.remove()

    @property
    def _params(self) -> list[Tensor]:
        return gradients.parameters(self._healing.optimizer)

    def _watch(self) -> None:
        """Puts the hook on a parameter that is trained; the one before may have been frozen."""
        if self._watched is not None and self._watched.requires_grad:
            return
        found = next((p for p in self._params if p.requires_grad and p.is_leaf), None)
        if found is None:
            return  # all are frozen, while another network trains: keep the old one
        if self._backward_handle is not None:
            self._backward_handle.remove()
        self._watched = found
        self._backward_handle = found.register_post_accumulate_grad_hook(self._backward_hook)

    def _on_backward(self, _: Tensor) -> None:
        self._reached = True

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._reached, self.stepped = False, True
        self._watch()
