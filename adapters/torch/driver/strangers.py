"""Noticing an optimizer that steps healed parameters and is not in the state.

`optimizer = AdamW(...)` in the middle of a run leaves the old one in the state: nothing is judged
any more, nothing goes back, and no hook of ours is ever called. Except torch's own, which are the
same for all optimizers.
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
"""Optimizers that are told of: a loop may make a new one for every epoch."""


class Strangers:
    """Watches every optimizer of the process. For those in the state that is one lookup a step.

    Args:
        state: the live state.
        healings: the handle of each of its optimizers, by name.
        tell: takes one line in words for each stranger.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        healings: Mapping[str, Healing],
        tell: Callable[[str], object],
    ) -> None:
        self._state = state
        self._healings = healings
        self._tell = tell
        self._known = {id(healing.optimizer) for healing in healings.values()}
        self._met: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._told = 0
        itself = weakref.ref(self)

        def stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
            watching = itself()
            if watching is not None:
                watching._look_at(optimizer)

        # Disabled as Healing's own hooks are. The registry is not to keep a forgotten driver alive.
        hook: Any = torch.compiler.disable(stepped)
        handle = register_optimizer_step_post_hook(hook)
        self.close = weakref.finalize(self, handle.remove)
        """Stops watching; harmless when called again."""

    def _look_at(self, optimizer: Optimizer) -> None:
        if id(optimizer) in self._known or optimizer in self._met:
            return
        if any(healing.in_step for healing in self._healings.values()):
            return  # one of the state's own steps it: a wrapper, a sharded optimizer
        self._met.add(optimizer)
        where = self._trained_by(optimizer)
        if not where or self._told == _MOST:
            return
        self._told += 1
        self._tell(
            f"{_a(type(optimizer).__name__)} that is not in the state trains parameters of "
            f"{where}: its steps are neither judged nor healed, nor is it saved; put it in the "
            "state, or change the param_groups of the one that is there instead of making a new one"
        )

    def _trained_by(self, optimizer: Optimizer) -> str:
        """Names of what is in the state and has a parameter of this optimizer."""
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


def _a(name: str) -> str:
    return f"{'an' if name[:1] in 'AEIO' else 'a'} {name}"
