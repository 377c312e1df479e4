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
from healcore.torch.gradients import ParamGroup
from healcore.torch.live_state import State


def group_names(state: State, optimizers: Mapping[str, Optimizer]) -> dict[str, list[list[str]]]:
    """The names of the parameters of each group, see `Driver.param_groups`.

    Args:
        state: the state of the run.
        optimizers: its optimizers by name, without wrappers.

    Returns:
        Optimizer -> for each of its groups the names of the parameters.
    """
    groups_of: dict[str, list[list[str]]] = {}
    for name, optimizer in optimizers.items():
        names = live_state.parameter_names(state, gradients.parameters(optimizer))
        groups: list[list[str]] = []
        start = 0
        for group in optimizer.param_groups:
            end = start + len(group["params"])
            groups.append(names[start:end])
            start = end
        groups_of[name] = groups
    return groups_of


class AddedGroups:
    """The groups that a restart has added to optimizers.

        first program    steps .. unfreezes a layer: add_param_group ─► checkpoint with its group
        restart          add (this class) ─► restore ─► the program's add_param_group: ignored once

    Args:
        state: the state of the run.
        optimizers: its optimizers by name, without wrappers.
    """

    def __init__(self, state: State, optimizers: Mapping[str, Optimizer]) -> None:
        self._state = state
        self._optimizers = optimizers
        self._undo: list[Callable[[], None]] = []

    def add(self, saved: Mapping[str, list[list[str]]]) -> list[str]:
        """Adds the groups that a checkpoint has and the program has not added yet.

        Adds groups only to an optimizer whose own groups are the first saved groups, and only if
        the modules have all parameters of the rest. The restore then sets the groups'
        hyperparameters.

        Args:
            saved: the result of `group_names` when the checkpoint was saved.

        Returns:
            The names of the parameters that an optimizer has received.
        """
        params: list[Tensor] = []
        for value in self._state.values():
            if isinstance(value, nn.Module):
                params += value.parameters()
        known = dict(zip(live_state.parameter_names(self._state, params), params, strict=True))
        added: list[str] = []
        for name, own_groups in group_names(self._state, self._optimizers).items():
            groups = saved.get(name, [])
            if groups[: len(own_groups)] != own_groups:
                continue
            missing_groups = groups[len(own_groups) :]
            missing: list[str] = []
            for group in missing_groups:
                missing += group
            if not missing_groups or not all(path in known for path in missing):
                continue
            ids_of_groups: list[set[int]] = []
            for group in missing_groups:
                tensors = [known[path].requires_grad_() for path in group]
                self._optimizers[name].add_param_group({"params": tensors})
                ids_of_groups.append({id(tensor) for tensor in tensors})
            self._undo.append(_ignore_once(self._optimizers[name], ids_of_groups))
            added += missing
        return added

    def close(self) -> None:
        """Restores the optimizers' own `add_param_group`."""
        for undo in self._undo:
            undo()


def _ignore_once(optimizer: Any, groups: list[set[int]]) -> Callable[[], None]:
    """Makes `add_param_group` do nothing, once, for each of these groups of ids of parameters.

    Returns a function that undoes it. torch would raise: "some parameters appear in more than one
    parameter group".
    """
    original = optimizer.add_param_group

    def add_param_group(group: ParamGroup) -> None:
        params = group["params"]
        if isinstance(params, Tensor):
            params = [params]
        params = list(params)  # may be an iterator, which can be read only once
        ids: set[int] = set()
        for p in params:
            if isinstance(p, tuple):  # name and parameter
                p = p[1]
            ids.add(id(p))
        if ids in groups:
            groups.remove(ids)
        else:
            original({**group, "params": params})

    def undo() -> None:
        if vars(optimizer).get("add_param_group") is add_param_group:
            del optimizer.add_param_group

    optimizer.add_param_group = add_param_group
    return undo
