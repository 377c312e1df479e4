"""`StructureWatch`: notices that the program changes which parameters it has, and how they look.

Programs prune, widen and add layers, unfreeze a layer with `add_param_group`, replace a head, or
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

_Ends = list[list[tuple[int, int, int]]]


class StructureWatch:
    """Compares the structure of a state with the structure at the last look.

    A step costs a look at the first and the last parameter of each group. Everything else is
    reported by torch: a module calls hooks when a parameter or a module is set on it. Only after
    such a sign are all parameters compared. A change without a sign (a layer deleted from a module,
    or written into the dictionary `_modules`) is found after the next sign.
    """

    def __init__(self, state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> None:
        self._state, self._optimizers = state, optimizers
        hook = _without_cycle(self._on_registration)
        self._handles = [
            registration.register_module_parameter_registration_hook(hook),
            registration.register_module_module_registration_hook(hook),
        ]
        self._remember()

    def changes(self) -> list[str]:
        """What has changed since the last call, each as a short text; empty without a change."""
        ends = _ends(self._optimizers)
        if not self._sign and ends == self._seen_ends:
            return []
        before = self._layout
        self._remember()
        return _differences(before, self._layout)

    def close(self) -> None:
        """Removes the hooks."""
        for handle in self._handles:
            handle.remove()

    def _remember(self) -> None:
        self._sign = False
        self._seen_ends = _ends(self._optimizers)
        self._layout = _layout(self._state, self._optimizers)
        # A set of weak references: modules that the program has dropped are not kept alive.
        self._modules = weakref.WeakSet(
            module
            for root in self._state.values()
            if isinstance(root, nn.Module)
            for module in root.modules()
        )

    def _on_registration(self, module: nn.Module) -> None:
        # Each new layer registers its own parameters too, and is not part of the model yet.
        self._sign = self._sign or module in self._modules


class _Layout(NamedTuple):
    """The structure of a state."""

    tensors: dict[str, tuple[int, ...]]
    """Path of each parameter and buffer of a module -> its shape."""
    groups: dict[str, list[list[tuple[int, tuple[int, ...]]]]]
    """Name of each optimizer -> id and shape of the parameters of each group."""


def _layout(state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> _Layout:
    tensors = {}
    for name, value in state.items():
        if isinstance(value, nn.Module):
            for path, tensor in (*value.named_parameters(), *value.named_buffers()):
                tensors[f"{name}.{path}"] = _shape(tensor)
    groups = {
        name: [[(id(p), _shape(p)) for p in group["params"]] for group in each.param_groups]
        for name, each in optimizers.items()
    }
    return _Layout(tensors, groups)


def _differences(before: _Layout, now: _Layout) -> list[str]:
    old, new = before.tensors, now.tensors
    found = [f"{path} is new" for path in new if path not in old]
    found += [f"{path} is gone" for path in old if path not in new]
    found += [
        f"{path} has the shape {new[path]}, not {old[path]}"
        for path in new
        if path in old and new[path] != old[path] and _is_weight(new[path], old[path])
    ]
    for name, groups in now.groups.items():
        earlier = before.groups[name]
        if groups != earlier:
            counts = sum(map(len, earlier)), sum(map(len, groups))
            found.append(
                f"{name} trains {counts[1]} parameters in {len(groups)} groups, not {counts[0]} in "
                f"{len(earlier)}"
                if (counts[0], len(earlier)) != (counts[1], len(groups))
                else f"{name} trains other parameters"
            )
    return found


def _is_weight(*shapes: tuple[int, ...]) -> bool:
    """Whether neither shape is of an empty buffer or a number, which layers fill as they run."""
    return all(torch.Size(shape).numel() > 1 for shape in shapes)


def _ends(optimizers: Mapping[str, Optimizer]) -> _Ends:
    """Length, first and last parameter of each group, and the size of the very first and last."""
    found = []
    for optimizer in optimizers.values():
        groups = [group["params"] for group in optimizer.param_groups]
        ends = [(len(ps), id(ps[0]) if ps else 0, id(ps[-1]) if ps else 0) for ps in groups]
        filled = [ps for ps in groups if ps]
        if filled:  # a program may cut weights, `p.data = p.data[kept]`
            ends.append((0, filled[0][0].numel(), filled[-1][-1].numel()))
        found.append(ends)
    return found


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
        found = reference()
        if found is not None:
            found(module)

    return hook
