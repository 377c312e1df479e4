"""Parameter groups that a program adds while it trains, in a restarted process.

A program that unfreezes a layer in epoch 2 builds its optimizer without this layer. The checkpoint
of epoch 3 has the layer's group, and moments for it. The group is added before the checkpoint is
restored, and the program's own call for the same parameters, which may come after the restart,
finds the group there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from healcore.torch import gradients, live_state


def group_names(
    state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]
) -> dict[str, list[list[str]]]:
    """See `Driver.param_groups`."""
    found = {}
    for name, optimizer in optimizers.items():
        names = iter(live_state.parameter_names(state, gradients.parameters(optimizer)))
        found[name] = [[next(names) for _ in group["params"]] for group in optimizer.param_groups]
    return found


class AddedGroups:
    """The groups that a restart has added to optimizers."""

    def __init__(self, state: Mapping[str, Any], optimizers: Mapping[str, Optimizer]) -> None:
        self._state, self._optimizers = state, optimizers
        self._undo: list[Callable[[], None]] = []

    def add(self, saved: Mapping[str, list[list[str]]]) -> list[str]:
        """See `Driver.add_param_groups`.

        Adds groups only to an optimizer whose own groups are the first saved ones, and only if the
        modules have all parameters of the rest. The restore then sets the groups' hyperparameters.
        """
        modules = [value for value in self._state.values() if isinstance(value, nn.Module)]
        params = [p for module in modules for p in module.parameters()]
        known = dict(zip(live_state.parameter_names(self._state, params), params, strict=True))
        added = []
        for name, own in group_names(self._state, self._optimizers).items():
            groups = saved.get(name, [])
            rest = groups[len(own) :]
            missing = [path for group in rest for path in group]
            if groups[: len(own)] != own or not all(path in known for path in missing):
                continue
            for group in rest:
                tensors = [known[path].requires_grad_() for path in group]
                self._optimizers[name].add_param_group({"params": tensors})
            if rest:
                ids = [{id(known[path]) for path in group} for group in rest]
                self._undo.append(_answer_again(self._optimizers[name], ids))
            added += missing
        return added

    def close(self) -> None:
        """Restores the optimizers' own `add_param_group`."""
        for undo in self._undo:
            undo()


def _answer_again(optimizer: Any, groups: list[set[int]]) -> Callable[[], None]:
    """Makes `add_param_group` do nothing, once, for each of these groups of ids of parameters.

    Returns a function that undoes it. torch would raise: "some parameters appear in more than one
    parameter group".
    """
    original = optimizer.add_param_group

    def add_param_group(group: dict[str, Any]) -> None:
        given = group["params"]
        given = [given] if isinstance(given, Tensor) else list(given)
        ids = {id(each[1] if isinstance(each, tuple) else each) for each in given}
        if ids in groups:
            groups.remove(ids)
        else:
            original({**group, "params": given})

    def undo() -> None:
        if vars(optimizer).get("add_param_group") is add_param_group:
            del optimizer.add_param_group

    optimizer.add_param_group = add_param_group
    return undo
