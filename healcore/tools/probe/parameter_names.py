"""Finds the names and layers of parameters in a torch optimizer state.

A torch optimizer state has numbers instead of names, in the order in which the program passed the
parameters. A name is used only if it is certain, because a wrong name points to the wrong layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from healcore.plugins.checkpoint_contents import dotted
from healcore.tools.probe.adam_states import AdamState, Path, Tree

_NUMBER = re.compile(r"\d+")
_MIN_BLOCKS, _MAX_BLOCK_SIZE = 3, 256
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

Shape = tuple[int, ...]


def layer(name: str) -> str:
    """Returns the layer of a parameter: its name up to the first part that contains a number.

    >>> layer("model.layers.3.mlp.up.weight"), layer("Dense_0.kernel"), layer("embed.weight")
    ('model.layers.3', 'Dense_0', 'embed')
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if _NUMBER.search(part):
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


class RepeatedBlocks(NamedTuple):
    """`count` consecutive blocks of `size` parameters each, with equal shapes in every block."""

    start: int
    size: int
    count: int

    def place(self, at: int) -> tuple[int, int] | None:
        """Returns block and place in the block of parameter `at`, or None outside the blocks."""
        block, place = divmod(at - self.start, self.size) if self.size else (-1, 0)
        return (block, place) if 0 <= block < self.count else None


def find_blocks(shapes: Sequence[Shape | None]) -> RepeatedBlocks:
    """Finds the longest run of at least three equal blocks; without a run `count` is 0.

    The layers of most networks have equal shapes, so such blocks are taken for layers.
    """
    numbers = {shape: at for at, shape in enumerate(dict.fromkeys(shapes))}
    kinds = np.array([numbers[shape] for shape in shapes])
    best, blocks = 0, RepeatedBlocks(0, 0, 0)
    for size in range(1, min(len(kinds) // _MIN_BLOCKS, _MAX_BLOCK_SIZE) + 1):
        edges = np.diff(
            np.concatenate([[False], kinds[size:] == kinds[:-size], [False]]).astype(int)
        )
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        longest = int((ends - begins).argmax()) if len(begins) else 0
        length = int(ends[longest] - begins[longest]) if len(begins) else 0
        if length > best and length >= (_MIN_BLOCKS - 1) * size:
            best = length
            blocks = RepeatedBlocks(int(begins[longest]), size, length // size + 1)
    return blocks


class _ModelLayer(NamedTuple):
    """One layer of a model. The order of the parameters within the layer is unknown."""

    name: str
    parameters: list[tuple[str, Shape]]

    def parameter(self, shape: Shape, number: str, kind: str) -> Parameter:
        """Names a parameter by its shape; `*` replaces parts in which several candidates differ."""
        names = [name.split(".") for name, known in self.parameters if known == shape]
        if len(names) == 1:
            return _named(".".join(names[0]), shape)
        alike = len({*map(len, names)}) == 1
        parts = zip(*names, strict=True) if alike else ([self.name], "*")
        shared = ".".join(part[0] if len({*part}) == 1 else "*" for part in parts)
        return Parameter(f"{shared} (parameter {number})", self.name, (kind, shape))


class _ModelParameters(NamedTuple):
    parameters: list[tuple[str, Shape]]
    in_order: bool

    def layers_of(
        self, blocks: RepeatedBlocks, shapes: Sequence[Shape | None]
    ) -> list[_ModelLayer]:
        """Returns the layer of each block, or an empty list if the shapes do not match.

        safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the order of the
        layers and loses the order of the parameters within a layer.
        """
        by_layer: dict[str, list[tuple[str, Shape]]] = {}
        for name, shape in self.parameters:
            if _NUMBER.search(layer(name)):
                by_layer.setdefault(layer(name), []).append((name, shape))
        if len(by_layer) != blocks.count or len({_NUMBER.sub("*", name) for name in by_layer}) > 1:
            return []
        layers = [_ModelLayer(name, by_layer[name]) for name in sorted(by_layer, key=_natural)]
        for at, found in enumerate(layers):
            begin = blocks.start + at * blocks.size
            block = Counter(shapes[begin : begin + blocks.size])
            if not block <= Counter(shape for _, shape in found.parameters):
                return []
        return layers


def _natural(name: str) -> list[tuple[int, str]]:
    """A key that sorts `layers.10` after `layers.9`."""
    return [(int(part), "") if part.isdecimal() else (0, part) for part in re.split(r"(\d+)", name)]


class Parameter(NamedTuple):
    """Name, layer and kind of a parameter."""

    name: str
    """The name, or the group and number of a parameter without a name."""
    layer: str
    """The layer, or the numbers of the parameters in the same block."""
    kind: tuple[str, Shape]
    """Key for comparisons: equal for the same parameter of similar layers, "" if unknown."""


class ParameterNames:
    """Names of the parameters in a checkpoint."""

    def __init__(self, tree: Tree, states: Sequence[AdamState]) -> None:
        self.by_order = False
        """Whether names were matched by order or shape."""
        self.missing = False
        """Whether a parameter has no name."""
        self._tree = tree
        self._shapes: dict[Path, dict[str, Shape]] = {}
        for state in states:
            shapes = self._shapes.setdefault(state.optimizer, {})
            shapes[dotted(state.parameter)] = state.second.shape
        self._models = _models(tree, self._shapes)
        self._known: dict[Path, Mapping[str, Parameter]] = {}

    def of(self, state: AdamState) -> Parameter:
        """Returns the name, layer and kind of a parameter."""
        number, shape = dotted(state.parameter), state.second.shape
        if number.isdecimal():
            if state.optimizer not in self._known:
                self._known[state.optimizer] = self._numbered(state.optimizer)
            parameter = self._known[state.optimizer][number]
        else:
            parameter = _named(number or "parameter", shape)
        self.missing = self.missing or not parameter.kind[0] or "parameter " in parameter.name
        if len(self._shapes) == 1:
            return parameter
        prefix = f"{dotted(state.optimizer)}: "
        return parameter._replace(name=prefix + parameter.name, layer=prefix + parameter.layer)

    def _numbered(self, optimizer: Path) -> Mapping[str, Parameter]:
        place = (*optimizer, "param_groups")
        groups: dict[str, list[str]] = {}
        for path, value in self._tree.values.items():
            if path[: len(place)] == place and len(path) == len(place) + 3 and path[-2] == "params":
                groups.setdefault(path[len(place)], []).append(str(value))
        shapes = self._shapes[optimizer]
        listed = {number for numbers in groups.values() for number in numbers}
        groups.setdefault("0", []).extend(number for number in shapes if number not in listed)
        known: dict[str, Parameter] = {}
        for group, numbers in groups.items():
            known |= self._of_group((*place, group), numbers, list(map(shapes.get, numbers)))
        return known

    def _of_group(
        self, group: Path, numbers: Sequence[str], shapes: Sequence[Shape | None]
    ) -> dict[str, Parameter]:
        """Returns the parameters of one group by number. A shape is None without a state."""
        saved = [
            self._tree.values.get((*group, "param_names", str(at))) for at in range(len(numbers))
        ]
        names = [str(name) if isinstance(name, str) else None for name in saved]
        blocks = find_blocks(shapes)
        layers: list[_ModelLayer] = []
        if not all(names):
            for model in self._models:
                match = in_order if model.in_order else by_shape
                names = max(names, match(shapes, model.parameters), key=_count_names)
                layers = layers or model.layers_of(blocks, shapes)
            self.by_order = self.by_order or bool(_count_names(names)) or bool(layers)
        known = {}
        for at, (number, name, shape) in enumerate(zip(numbers, names, shapes, strict=True)):
            if shape is not None and name is not None:
                known[number] = _named(name, shape)
            elif shape is not None:
                known[number] = _unnamed(group[-1], numbers, at, shape, blocks, layers)
        return known


def _count_names(names: Sequence[str | None]) -> int:
    return sum(name is not None for name in names)


def _named(name: str, shape: Shape) -> Parameter:
    return Parameter(name, layer(name), (_NUMBER.sub("*", name), shape))


def _unnamed(
    group: str,
    numbers: Sequence[str],
    at: int,
    shape: Shape,
    blocks: RepeatedBlocks,
    layers: Sequence[_ModelLayer],
) -> Parameter:
    """Names a parameter by its number, and by its layer or block if `blocks` contain it."""
    name, position = f"group {group}, parameter {numbers[at]}", blocks.place(at)
    if position is None:
        return Parameter(name, name, ("", shape))
    block, place = position
    kind = f"group {group}, place {place}"
    if layers:
        return layers[block].parameter(shape, numbers[at], kind)
    first = blocks.start + block * blocks.size
    last = first + blocks.size - 1
    span = f"group {group}, parameters {numbers[first]} to {numbers[last]}"
    return Parameter(name, span if last > first else name, (kind, shape))


def in_order(
    shapes: Sequence[Shape | None], model: Sequence[tuple[str, Shape]]
) -> list[str | None]:
    """Matches parameters in the model's order by shape; a name is None where not certain.

    Each parameter is matched with the first possible parameter of the model, and from the back with
    the last possible parameter. A name is certain if both agree. A shape is None without a state.
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
    """Names the parameters whose shape is unique, for a model with an unknown order."""
    in_model = Counter(shape for _, shape in model)
    wanted = Counter(shapes)
    names = {shape: name for name, shape in model}
    return [
        names[shape] if shape is not None and in_model[shape] == wanted[shape] == 1 else None
        for shape in shapes
    ]


def _places(shapes: Sequence[Shape | None], model: Sequence[Shape]) -> list[int] | None:
    places, at = [], 0
    for shape in shapes:
        while at < len(model) and shape is not None and model[at] != shape:
            at += 1
        if at == len(model):
            return None
        places.append(at)
        at += 1
    return places


def _models(tree: Tree, optimizers: Collection[Path]) -> list[_ModelParameters]:
    """Returns possible models: arrays outside optimizers, by top-level key and all together."""
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
