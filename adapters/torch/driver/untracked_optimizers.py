"""Warns of an optimizer that steps healed parameters and is not in the state.

`optimizer = AdamW(...)` in the middle of a run leaves the old one in the state: from then on
nothing is judged, nothing is rolled back, and no hook on the old optimizer is called. Only torch's
global step hook notices, which runs for every optimizer of the process.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from healcore.torch import gradients
from healcore.torch.healing import Healing

_MOST = 10
"""Optimizers with a warning at most: a loop may make a new one for every epoch."""


class UntrackedOptimizers:
    """Watches every optimizer of the process. For those in the state that is one lookup per step.

    Args:
        state: the live state.
        healings: the handle of each of its optimizers, by name.
        warn: called with one line of text for each untracked optimizer.
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

        # Disabled like Healing's own hooks. torch's registry must not keep an unused driver alive.
        hook: Any = torch.compiler.disable(stepped)
        handle = register_optimizer_step_post_hook(hook)
        self.close = weakref.finalize(self, handle.remove)
        """Stops watching. Calling it again does nothing."""

    def _check(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known or optimizer in self._checked:
            return
        if any(healing.in_step for healing in self._healings.values()):
            return  # an optimizer of the state steps it: a wrapper, a sharded optimizer
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
        found = [
            f'"{name}"'
            for name, value in self._state.items()
            if isinstance(value, nn.Module) and any(id(p) in params for p in value.parameters())
        ] or [
            f'"{name}"'
            for name, healing in self._healings.items()
            if any(id(p) in params for p in gradients.parameters(healing.optimizer))
        ]
        return ", ".join(found)
