"""Finds names for parameters that torch only numbers, and the layer of a name.

The state of a torch optimizer numbers its parameters, in the order in which the program passed
them. A name is used only where it is certain: a wrong name sends people to the wrong layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from healcore.plugins.checkpoint_contents import dotted
from healcore.tools.probe.adam_states import AdamState, Path, Tree

_NUMBER = re.compile(r"\d+")
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

Shape = tuple[int, ...]


def layer(name: str) -> str:
    """The layer of a parameter: its name up to the first part that contains a number.

    >>> layer("model.layers.3.mlp.up.weight"), layer("Dense_0.kernel"), layer("embed.weight")
    ('model.layers.3', 'Dense_0', 'embed')
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if _NUMBER.search(part):
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


class _ModelParameters(NamedTuple):
    parameters: list[tuple[str, Shape]]
    in_order: bool


class ParameterNames:
    """Names of the parameters in a checkpoint.

    `by_order`: some names were matched with the model by order or shape. `missing`: some have none.
    """

    def __init__(self, tree: Tree, found: Sequence[AdamState]) -> None:
        self.by_order = self.missing = False
        self._tree = tree
        self._shapes = {(state.optimizer, state.parameter): state.second.shape for state in found}
        optimizers = dict.fromkeys(state.optimizer for state in found)
        self._models = _models(tree, optimizers)
        self._several = len(optimizers) > 1
        self._known: dict[Path, Mapping[str, str]] = {}

    def of(self, state: AdamState) -> str:
        """The name of a parameter, or its group and number."""
        name = self._name(state)
        if name is None:
            self.missing = True
            name = f"group {state.group or 0}, parameter {dotted(state.parameter)}"
        return f"{dotted(state.optimizer)}: {name}" if self._several else name

    def kind(self, state: AdamState) -> str:
        """What similar parameters in other layers share: the name without numbers, the shape."""
        name = self._name(state)
        return f"{'' if name is None else _NUMBER.sub('*', name)} {state.second.shape}"

    def _name(self, state: AdamState) -> str | None:
        parameter = dotted(state.parameter)
        if not parameter.isdecimal():
            return parameter or "parameter"
        if state.optimizer not in self._known:
            self._known[state.optimizer] = self._numbered(state.optimizer)
        return self._known[state.optimizer].get(parameter)

    def _numbered(self, optimizer: Path) -> Mapping[str, str]:
        place = (*optimizer, "param_groups")
        groups: dict[str, list[str]] = {}
        for path, value in self._tree.values.items():
            if path[: len(place)] == place and len(path) == len(place) + 3 and path[-2] == "params":
                groups.setdefault(path[len(place)], []).append(str(value))
        names: dict[str, str] = {}
        for group, numbers in groups.items():
            listed = (*place, group, "param_names")
            given = [self._tree.values.get((*listed, str(at))) for at in range(len(numbers))]
            if all(isinstance(name, str) for name in given):
                names |= dict(zip(numbers, map(str, given), strict=True))
                continue
            shapes = [self._shapes.get((optimizer, (number,))) for number in numbers]
            best: dict[str, str] = {}
            for model in self._models:
                match = in_order if model.in_order else by_shape
                matched = dict(zip(numbers, match(shapes, model.parameters), strict=True))
                certain = {number: name for number, name in matched.items() if name is not None}
                best = max(best, certain, key=len)
            self.by_order = self.by_order or bool(best)
            names |= best
        return names


def in_order(
    shapes: Sequence[Shape | None], model: Sequence[tuple[str, Shape]]
) -> list[str | None]:
    """Names of parameters that are given in the model's order, matched by their shapes.

    Each is placed at the first possible parameter of the model, and once more from the back at the
    last possible one. A name is certain where both places agree. A shape is None without a state.
    """
    front = _places(shapes, [shape for _, shape in model])
    back = _places(shapes[::-1], [shape for _, shape in model[::-1]])
    if front is None or back is None:
        return [None] * len(shapes)
    back = [len(model) - 1 - at for at in back[::-1]]
    return [model[a][0] if a == b else None for a, b in zip(front, back, strict=True)]


def by_shape(
    shapes: Sequence[Shape | None], model: Sequence[tuple[str, Shape]]
) -> list[str | None]:
    """Names of parameters whose shape is unique, for a model whose order is not known."""
    there = Counter(shape for _, shape in model)
    wanted = Counter(shapes)
    names = {shape: name for name, shape in model}
    return [
        names[shape] if shape is not None and there[shape] == wanted[shape] == 1 else None
        for shape in shapes
    ]


def _places(shapes: Sequence[Shape | None], there: Sequence[Shape]) -> list[int] | None:
    places, at = [], 0
    for shape in shapes:
        while at < len(there) and shape is not None and there[at] != shape:
            at += 1
        if at == len(there):
            return None
        places.append(at)
        at += 1
    return places


def _models(tree: Tree, optimizers: Mapping[Path, None]) -> list[_ModelParameters]:
    """Candidates for the model: the arrays outside optimizers below each top-level key, and all."""
    roots: dict[str, list[tuple[str, Shape]]] = {}
    everything: list[tuple[str, Shape]] = []
    ordered: dict[str, bool] = {}
    seen = set()
    for path, array in tree.arrays.items():
        if any(path[: len(at)] == at for at in optimizers if at) or "float" not in array.dtype:
            continue
        if path[-1] in _BUFFERS or (array.storage is not None and array.storage in seen):
            continue
        seen.add(array.storage)
        roots.setdefault(path[0], []).append((dotted(path[1:]) or path[0], array.shape))
        ordered[path[0]] = ordered.get(path[0], True) and array.in_order
        everything.append((dotted(path), array.shape))
    models = [_ModelParameters(parameters, ordered[root]) for root, parameters in roots.items()]
    return [*models, _ModelParameters(everything, all(ordered.values()))]
