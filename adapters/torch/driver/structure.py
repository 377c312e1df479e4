"""`StructureWatch`: notices that the program has added, removed or resized parameters.

Programs prune, widen and add layers, unfreeze a layer in a new parameter group, replace a head, or
densify a cloud of Gaussians. Older checkpoints and copies of weights do not fit such a model.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as registration
from torch.optim import Optimizer

from healcore.torch.live_state import State

_GroupEnds = list[list[tuple[int, int, int]]]
"""For each optimizer, what `_group_ends` compares."""


class StructureWatch:
    """Compares the structure of a state with the structure at the last look.

    A step costs a look at the first and the last parameter of each group. Everything else is
    reported by torch: a module calls hooks when a parameter or a module is set on it. Only after
    such a sign are all parameters compared. A change without a sign (a layer deleted from a module,
    or written into the dictionary `_modules`) is found after the next sign.

    Args:
        state: the state of the run.
        optimizers: its optimizers by name, without wrappers.
    """

    def __init__(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        self._state = state
        self._optimizers = optimizers
        hook = _without_cycle(self._on_registration)
        self._handles = [
            registration.register_module_parameter_registration_hook(hook),
            registration.register_module_module_registration_hook(hook),
        ]
        self._remember()

    def changes(self) -> list[str]:
        """What has changed since the last call.

        Cheap without a sign of a change, so that it can be called at each step.

        Returns:
            A short text for each change, for example "model.0.weight is new". Empty without one.
        """
        ends = _group_ends(self._optimizers)
        if not self._has_sign and ends == self._seen_ends:
            return []
        before = self._layout
        self._remember()
        return _differences(before, self._layout)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _remember(self) -> None:
        """Remembers the structure as it is now."""
        self._has_sign = False
        self._seen_ends = _group_ends(self._optimizers)
        self._layout = _layout(self._state, self._optimizers)
        # A set of weak references: modules that the program has dropped are not kept alive.
        self._modules: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        for root in self._state.values():
            if isinstance(root, nn.Module):
                self._modules.update(root.modules())

    def _on_registration(self, module: nn.Module) -> None:
        # Each new layer registers its own parameters too, and is not part of the model yet.
        if module in self._modules:
            self._has_sign = True


class _Layout(NamedTuple):
    """The structure of a state."""

    tensors: dict[str, tuple[int, ...]]
    """Path of each parameter and buffer of a module -> its shape."""
    groups: dict[str, list[list[tuple[int, tuple[int, ...]]]]]
    """Name of each optimizer -> id and shape of the parameters of each group."""


def _layout(state: State, optimizers: Mapping[str, Optimizer]) -> _Layout:
    """The structure of a state now."""
    tensors: dict[str, tuple[int, ...]] = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for path, tensor in (*value.named_parameters(), *value.named_buffers()):
                tensors[f"{name}.{path}"] = _shape(tensor)
    groups_of: dict[str, list[list[tuple[int, tuple[int, ...]]]]] = {}
    for name, optimizer in optimizers.items():
        groups_of[name] = []
        for group in optimizer.param_groups:
            groups_of[name].append([(id(p), _shape(p)) for p in group["params"]])
    return _Layout(tensors, groups_of)


def _differences(before: _Layout, now: _Layout) -> list[str]:
    """The differences of two structures as short texts."""
    old = before.tensors
    new = now.tensors
    texts = [f"{path} is new" for path in new if path not in old]
    texts += [f"{path} is gone" for path in old if path not in new]
    for path, shape in new.items():
        earlier_shape = old.get(path, shape)
        if shape != earlier_shape and _is_weight(shape, earlier_shape):
            texts.append(f"{path} has the shape {shape}, not {earlier_shape}")
    for name, groups in now.groups.items():
        earlier = before.groups[name]
        if groups == earlier:
            continue
        count = sum(map(len, groups))
        earlier_count = sum(map(len, earlier))
        if count == earlier_count and len(groups) == len(earlier):
            texts.append(f"{name} trains other parameters")
        else:
            texts.append(
                f"{name} trains {count} parameters in {len(groups)} groups, not {earlier_count} in "
                f"{len(earlier)}"
            )
    return texts


def _is_weight(*shapes: tuple[int, ...]) -> bool:
    """Whether both tensors have several elements: layers resize empty buffers as they run."""
    return all(torch.Size(shape).numel() > 1 for shape in shapes)


def _group_ends(optimizers: Mapping[str, Optimizer]) -> _GroupEnds:
    """Length, first and last parameter of each group, and the size of the very first and last."""
    ends_of_all: _GroupEnds = []
    for optimizer in optimizers.values():
        ends: list[tuple[int, int, int]] = []
        first: Tensor | None = None
        last: Tensor | None = None
        for group in optimizer.param_groups:
            params = group["params"]
            if not params:
                ends.append((0, 0, 0))
                continue
            ends.append((len(params), id(params[0]), id(params[-1])))
            if first is None:
                first = params[0]
            last = params[-1]
        if first is not None and last is not None:
            # A program may cut weights, `p.data = p.data[kept]`.
            ends.append((0, first.numel(), last.numel()))
        ends_of_all.append(ends)
    return ends_of_all


def _shape(tensor: Tensor) -> tuple[int, ...]:
    try:
        return tuple(tensor.shape)
    except RuntimeError:  # a lazy parameter has none yet
        return ()


def _without_cycle(method: Callable[[nn.Module], None]) -> Callable[..., None]:
    """A hook for torch's global list that does not keep the owner of the method alive."""
    reference = weakref.WeakMethod(method)

    def hook(module: nn.Module, name: str, value: Any) -> None:
        del name, value
        live_method = reference()
        if live_method is not None:
            live_method(module)

    return hook
