"""Hooks by which the driver notices accumulated gradients and optimizers outside of the state."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from healcore.torch import gradients
from healcore.torch.healing import Healing

_MOST = 10
"""Most warnings: a loop may make a new optimizer for every epoch."""


class Accumulation:
    """Whether `.grad` holds gradients that an optimizer has not stepped with.

    Many loops clear gradients only before the next backward, so hooks record each backward pass and
    step. Losses count too, because some wrappers write `.grad` without autograd.
    """

    def __init__(self, healing: Healing) -> None:
        self._healing = healing
        self._reached = False
        self.stepped = False
        """Whether the optimizer has stepped; the reader resets it."""
        self.steps = 0
        """Steps so far."""
        self.on_step: Callable[[], None] | None = None
        """Called after each step."""
        # They must not be traced into a compiled step.
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

    def drop_by_products(self) -> None:
        """Ignores the present gradients, which `zero_grad` drops, and drops the present losses.

        A step of another optimizer has left them. A checkpoint has no losses: the next step must be
        judged without them too.
        """
        self._reached = False
        self._healing.drop_losses()

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
        """Moves the hook to a trained parameter if the present one has been frozen."""
        if self._watched is not None and self._watched.requires_grad:
            return
        found = next((p for p in self._params if p.requires_grad and p.is_leaf), None)
        if found is None:
            return  # all are frozen while another network trains
        if self._backward_handle is not None:
            self._backward_handle.remove()
        self._watched = found
        self._backward_handle = found.register_post_accumulate_grad_hook(self._backward_hook)

    def _on_backward(self, _: Tensor) -> None:
        self._reached = True

    def _on_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._reached, self.stepped = False, True
        self.steps += 1
        self._watch()
        if self.on_step is not None:
            self.on_step()


class UntrackedOptimizers:
    """Warns of an optimizer that steps healed parameters and is not in the state.

    After `optimizer = AdamW(...)` in the middle of a run nothing is judged or rolled back. No hook
    on the old optimizer runs, only torch's global step hook, for every optimizer of the process.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        healings: Mapping[str, Healing],
        warn: Callable[[str], object],
    ) -> None:
        self._state = state
        self._healings = healings
        self._warn = warn
        self._known = {id(healing.optimizer) for healing in healings.values()}
        self._checked: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._warnings = 0
        weak_self = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watcher = weak_self()
            if watcher is not None:
                watcher._check(optimizer)

        # Weak, because torch's registry must not keep an unused driver alive.
        hook: Any = torch.compiler.disable(stepped)
        handle = register_optimizer_step_post_hook(hook)
        self.close = weakref.finalize(self, handle.remove)
        """Stops watching. Calling it again does nothing."""

    def _check(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known or optimizer in self._checked:
            return
        if any(healing.in_step for healing in self._healings.values()):
            return  # an optimizer of the state wraps it, or shards it
        self._checked.add(optimizer)
        owners = self._owners(optimizer)
        if not owners or self._warnings == _MOST:
            return
        self._warnings += 1
        self._warn(
            f"an optimizer ({type(optimizer).__name__}) that is not in the state trains parameters "
            f"of {owners}: its steps are neither judged nor healed, nor is it saved; put it in the "
            "state, or change the param_groups of the one that is there instead of making a new one"
        )

    def _owners(self, optimizer: Optimizer) -> str:
        """Names of the items in the state that have a parameter of this optimizer."""
        params = {id(p) for p in gradients.parameters(optimizer)}
        owned = {n: m.parameters() for n, m in self._state.items() if isinstance(m, nn.Module)}
        trained = {n: gradients.parameters(h.optimizer) for n, h in self._healings.items()}
        for items in (owned, trained):
            found = [f'"{n}"' for n, each in items.items() if any(id(p) in params for p in each)]
            if found:
                return ", ".join(found)
        return ""
