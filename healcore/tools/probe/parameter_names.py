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
Named = list[tuple[str, Shape]]
"""Names and shapes of parameters."""


class Parameter(NamedTuple):
    """Name, layer and kind of a parameter."""

    name: str
    """The name, or the group and number of a parameter without a name."""
    layer: str
    """The layer, or the numbers of the parameters in the same block."""
    kind: tuple[str, Shape]
    """Key for comparisons: equal for the same parameter of similar layers, "" if unknown."""


class RepeatedBlocks(NamedTuple):
    """`count` consecutive blocks of `size` parameters each, with equal shapes in every block."""

    start: int
    size: int
    count: int


def name_parameters(tree: Tree, states: Sequence[AdamState]) -> list[Parameter]:
    """Returns the name, layer and kind of the parameter of each state."""
    shapes: dict[Path, dict[str, Shape]] = {}
    for state in states:
        shapes.setdefault(state.optimizer, {})[dotted(state.parameter)] = state.second.shape
    models = _models(tree, shapes)
    known = {
        optimizer: _of_optimizer(tree, optimizer, found, models)
        for optimizer, found in shapes.items()
    }
    parameters = []
    for state in states:
        parameter = known[state.optimizer][dotted(state.parameter)]
        if len(shapes) > 1:
            prefix = f"{dotted(state.optimizer)}: "
            name, layer, kind = parameter
            parameter = Parameter(prefix + name, prefix + layer, kind)
        parameters.append(parameter)
    return parameters


def layer_of(name: str) -> str:
    """Returns the layer of a parameter: its name up to the first part that contains a number.

    >>> layer_of("model.layers.3.mlp.up.weight"), layer_of("embed.weight")
    ('model.layers.3', 'embed')
    """
    parts = name.split(".")
    for at, part in enumerate(parts):
        if _NUMBER.search(part):
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


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


def _named(name: str, shape: Shape) -> Parameter:
    return Parameter(name, layer_of(name), (_NUMBER.sub("*", name), shape))


def _of_optimizer(
    tree: Tree, optimizer: Path, shapes: Mapping[str, Shape], models: Sequence[tuple[Named, bool]]
) -> dict[str, Parameter]:
    """Returns the parameters of an optimizer by name or number."""
    known = {
        name: _named(name or "parameter", shape)
        for name, shape in shapes.items()
        if not name.isdecimal()
    }
    groups: dict[str, list[str]] = {}
    listed = tree.groups.get(optimizer, {})
    for number in [*listed, *(number for number in shapes if number not in listed)]:
        if number.isdecimal():
            groups.setdefault(listed.get(number, "0"), []).append(number)
    for group, numbers in groups.items():
        place = (*optimizer, "param_groups", group, "param_names")
        saved = [tree.values.get((*place, str(at))) for at in range(len(numbers))]
        known |= _of_group(group, numbers, [shapes.get(each) for each in numbers], saved, models)
    return known


def _of_group(
    group: str,
    numbers: Sequence[str],
    shapes: Sequence[Shape | None],
    names: Sequence[str | None],
    models: Sequence[tuple[Named, bool]],
) -> dict[str, Parameter]:
    """Returns the parameters of one group by number. A shape is None if it is unknown."""
    blocks = find_blocks(shapes)
    layers: list[tuple[str, Named]] = []
    if not all(names):
        equal = [model for model, ordered in models if ordered and _is_model(shapes, model)]
        names = [name for name, _ in equal[0]] if equal else [None] * len(shapes)
        layers = next(filter(None, (_layers(model, blocks, shapes) for model, _ in models)), [])
    known = {}
    for at, (number, name, shape) in enumerate(zip(numbers, names, shapes, strict=True)):
        unnamed = f"group {group}, parameter {number}"
        block, place = divmod(at - blocks.start, blocks.size) if blocks.size else (-1, 0)
        if shape is None:
            continue
        if name:
            known[number] = _named(name, shape)
        elif not 0 <= block < blocks.count:
            known[number] = Parameter(unnamed, unnamed, ("", shape))
        else:
            kind = (f"group {group}, place {place}", shape)
            first, last = numbers[at - place], numbers[at - place + blocks.size - 1]
            layer = f"group {group}, parameters {first} to {last}"
            if layers:
                layer, members = layers[block]
                same = [each for each, of in members if of == shape]
                unnamed = same[0] if len(same) == 1 else f"{layer}.* (parameter {number})"
            elif blocks.size == 1:
                layer = unnamed
            known[number] = Parameter(unnamed, layer, kind)
    return known


def _is_model(shapes: Sequence[Shape | None], model: Named) -> bool:
    """Whether the parameters have the shapes of the model; an unknown shape is None."""
    return len(shapes) == len(model) and all(
        shape in (None, known) for shape, (_, known) in zip(shapes, model, strict=True)
    )


def _layers(
    model: Named, blocks: RepeatedBlocks, shapes: Sequence[Shape | None]
) -> list[tuple[str, Named]]:
    """Returns the model's layer for each block, or an empty list if the shapes do not match.

    safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the order of the layers
    and loses the order of the parameters within a layer.
    """
    by_layer: dict[str, Named] = {}
    for name, shape in model:
        if _NUMBER.search(layer_of(name)):
            by_layer.setdefault(layer_of(name), []).append((name, shape))
    if len(by_layer) != blocks.count or len({_NUMBER.sub("*", name) for name in by_layer}) > 1:
        return []
    layers = sorted(by_layer.items(), key=lambda pair: list(map(int, _NUMBER.findall(pair[0]))))
    for at, (_, members) in enumerate(layers):
        begin = blocks.start + at * blocks.size
        if not Counter(shapes[begin : begin + blocks.size]) <= Counter(of for _, of in members):
            return []
    return layers


def _models(tree: Tree, optimizers: Collection[Path]) -> list[tuple[Named, bool]]:
    """Returns possible models, and whether each has the program's order.

    The arrays outside optimizers, by top-level key and all together.
    """
    roots: dict[str, Named] = {}
    everything: Named = []
    sorted_roots = set()
    seen = set()
    for path, array in tree.arrays.items():
        if any(path[: len(at)] == at for at in optimizers if at) or "float" not in array.dtype:
            continue
        if path[-1] in _BUFFERS or (array.storage is not None and array.storage in seen):
            continue
        seen.add(array.storage)
        roots.setdefault(path[0], []).append((dotted(path[1:]) or path[0], array.shape))
        if not array.in_order:
            sorted_roots.add(path[0])
        everything.append((dotted(path), array.shape))
    models = [(parameters, root not in sorted_roots) for root, parameters in roots.items()]
    return [*models, (everything, not sorted_roots)]
