"""`StructureWatch`: notices that the program has added, removed or resized parameters.

Programs prune, widen and add layers, unfreeze a layer in a new parameter group, replace a head, or
densify a cloud of Gaussians. Older checkpoints and copies of weights do not fit such a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.torch.live_state import State


class StructureWatch:
    """Compares the structure of a state with the structure at the last look.

    Each step looks at the identities of modules and parameters, and the shapes of the optimizers'
    parameters. Names are compared only if one of them has changed.

    Args:
        state: the state of the run.
        optimizers: its optimizers by name, without wrappers.
    """

    def __init__(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        self._state = state
        self._optimizers = optimizers
        self._remember()

    def changes(self) -> list[str]:
        """What has changed since the last call.

        Returns:
            A short text for each change, for example "model.0.weight is new". Empty without one.
        """
        if self._seen == self._look():
            return []
        before = self._layout
        self._remember()
        return _differences(before, self._layout)

    def _remember(self) -> None:
        """Remembers the structure as it is now."""
        roots = [root for root in self._state.values() if isinstance(root, nn.Module)]
        modules = [module for root in roots for module in root.modules()]
        self._tables: list[dict[str, Any]] = []
        """The parameters and the submodules of each module."""
        for module in modules:
            self._tables += [module._parameters, module._modules]
        self._buffers = [module._buffers for module in modules]
        self._seen = self._look()
        self._layout = _layout(self._state, self._optimizers)

    def _look(self) -> list[Any]:
        """What differs after almost every change, and is fast to compare."""
        seen: list[Any] = [id(value) for table in self._tables for value in table.values()]
        seen += [name for names in self._buffers for name in names]  # a forward replaces the values
        for optimizer in self._optimizers.values():
            for group in optimizer.param_groups:
                seen.append(_shapes(group["params"]))
        return seen


def _layout(state: State, optimizers: Mapping[str, Optimizer]) -> dict[str, Any]:
    """Path of each tensor of a module -> its shape; optimizer -> its parameters."""
    layout: dict[str, Any] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for path, tensor in (*value.named_parameters(name), *value.named_buffers(name)):
                layout[path] = _shape(tensor)
    for name, optimizer in optimizers.items():
        layout[name] = [_shapes(group["params"]) for group in optimizer.param_groups]
    return layout


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences of two structures as short texts."""
    texts = [f"{path} is new" for path in now if path not in before]
    for path, old in before.items():
        if path not in now:
            texts.append(f"{path} is gone")
            continue
        new = now[path]
        if new != old and isinstance(old, list):
            texts.append(f"{path} trains other parameters")
        elif new != old and min(torch.Size(new).numel(), torch.Size(old).numel()) > 1:
            # Layers resize empty buffers as they run.
            texts.append(f"{path} has the shape {tuple(new)}, not {tuple(old)}")
    return texts


def _shapes(params: list[Tensor]) -> list[tuple[int, tuple[int, ...]]]:
    """Identity and shape of each parameter."""
    return [(id(p), _shape(p)) for p in params]


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tensor.shape
    except RuntimeError:  # a lazy parameter has none yet
        return ()
