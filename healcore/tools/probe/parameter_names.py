"""Finds the names and layers of parameters in a torch optimizer state.

A torch optimizer state has numbers instead of names, in the order in which the program passed the
parameters. A name is used only if it is certain, because a wrong name points to the wrong layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

import numpy as np

from healcore.plugins.checkpoint_contents import dotted
from healcore.tools.probe.moments import Moments, Shape, Tree

_NUMBER = re.compile(r"\d+")
_MIN_BLOCKS, _MAX_BLOCK_SIZE = 3, 256
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

Model = list[tuple[str, Shape]]
"""Names and shapes of parameters."""


def name_parameters(tree: Tree, moments: Sequence[Moments]) -> None:
    """Sets the name, layer and kind of the parameters."""
    optimizers: dict[tuple[str, ...], dict[str, Moments]] = {}
    for each in moments:
        optimizers.setdefault(each.optimizer, {})[each.key] = each
    models = _models(tree, list(optimizers))
    for optimizer, members in optimizers.items():
        groups: dict[str, list[str]] = {}
        listed = tree.groups.get(optimizer, {})
        for key in [*listed, *(key for key in members if key not in listed)]:
            if key.isdecimal():
                groups.setdefault(listed.get(key, "0"), []).append(key)
            elif key in members:
                _set_name(members[key], key or "parameter")
        for group, numbers in groups.items():
            place = (*optimizer, "param_groups", group, "param_names")
            names = [tree.values.get((*place, str(at))) for at in range(len(numbers))]
            _name_group(group, numbers, [members.get(each) for each in numbers], names, models)
        if len(optimizers) > 1:
            for each in members.values():
                each.name = f"{dotted(optimizer)}: {each.name}"
                each.layer = f"{dotted(optimizer)}: {each.layer}"


def _set_name(moments: Moments, name: str) -> None:
    moments.name, moments.layer = name, layer_of(name)
    moments.kind = (_NUMBER.sub("*", name), moments.second.shape)


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


def _name_group(
    group: str,
    numbers: Sequence[str],
    members: Sequence[Moments | None],
    names: Sequence[str | None],
    models: Sequence[tuple[Model, bool]],
) -> None:
    """Names the parameters of one group. A parameter without state is None."""
    shapes = [each and each.second.shape for each in members]
    start, size, count = find_blocks(shapes)
    layers: list[tuple[str, Model]] = []
    if not all(names):
        equal = [model for model, ordered in models if ordered and _has_shapes(model, shapes)]
        names = [name for name, _ in equal[0]] if equal else [None] * len(shapes)
        blocks = [shapes[at : at + size] for at in range(start, start + count * size, size or 1)]
        layers = next(filter(None, (_layers_of(model, blocks) for model, _ in models)), [])
    for at, (number, each, name) in enumerate(zip(numbers, members, names, strict=True)):
        block, place = divmod(at - start, size) if size else (-1, 0)
        if each is None:
            continue
        if name:
            _set_name(each, name)
            continue
        shape = each.second.shape
        each.name = each.layer = f"group {group}, parameter {number}"
        each.kind = ("", shape)
        if 0 <= block < count:
            each.kind = (f"group {group}, place {place}", shape)
            if layers:
                each.layer, layer = layers[block]
                same = [name for name, of in layer if of == shape]
                unknown = f"{each.layer}.* (parameter {number})"
                each.name = same[0] if len(same) == 1 else unknown
            elif size > 1:
                first, last = numbers[at - place], numbers[at - place + size - 1]
                each.layer = f"group {group}, parameters {first} to {last}"


def find_blocks(shapes: Sequence[Shape | None]) -> tuple[int, int, int]:
    """Finds the longest run of at least three consecutive blocks with equal shapes.

    The layers of most networks have equal shapes, so such blocks are taken for layers.

    Returns:
        The first parameter, the size of a block, and the number of blocks; zeros without a run.
    """
    numbers = {shape: at for at, shape in enumerate(dict.fromkeys(shapes))}
    kinds = np.array([numbers[shape] for shape in shapes])
    best, blocks = 0, (0, 0, 0)
    for size in range(1, min(len(kinds) // _MIN_BLOCKS, _MAX_BLOCK_SIZE) + 1):
        edges = np.diff(
            np.concatenate([[False], kinds[size:] == kinds[:-size], [False]]).astype(int)
        )
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        longest = int((ends - begins).argmax()) if len(begins) else 0
        length = int(ends[longest] - begins[longest]) if len(begins) else 0
        if length > best and length >= (_MIN_BLOCKS - 1) * size:
            best, blocks = length, (int(begins[longest]), size, length // size + 1)
    return blocks


def _has_shapes(model: Model, shapes: Sequence[Shape | None]) -> bool:
    """Whether the model has these shapes; an unknown shape is None."""
    return len(shapes) == len(model) and all(
        shape in (None, known) for shape, (_, known) in zip(shapes, model, strict=True)
    )


def _layers_of(model: Model, blocks: Sequence[Sequence[Shape | None]]) -> list[tuple[str, Model]]:
    """Returns the model's layer for each block, or an empty list if the shapes do not match.

    safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the order of the layers
    and loses the order of the parameters within a layer.
    """
    by_layer: dict[str, Model] = {}
    for name, shape in model:
        if _NUMBER.search(layer_of(name)):
            by_layer.setdefault(layer_of(name), []).append((name, shape))
    if len(by_layer) != len(blocks) or len({_NUMBER.sub("*", name) for name in by_layer}) > 1:
        return []
    layers = sorted(by_layer.items(), key=lambda pair: list(map(int, _NUMBER.findall(pair[0]))))
    pairs = zip(layers, blocks, strict=True)
    fits = all(Counter(block) <= Counter(of for _, of in layer) for (_, layer), block in pairs)
    return layers if fits else []


def _models(tree: Tree, optimizers: Sequence[tuple[str, ...]]) -> list[tuple[Model, bool]]:
    """Returns possible models, and whether each has the program's order.

    The arrays outside optimizers, by top-level key and all together.
    """
    models: dict[str | None, Model] = {}
    everything: Model = []
    is_sorted = set()
    seen = set()
    for path, array in tree.arrays.items():
        if any(path[: len(at)] == at for at in optimizers if at) or "float" not in array.dtype:
            continue
        if path[-1] in _BUFFERS or (array.storage is not None and array.storage in seen):
            continue
        seen.add(array.storage)
        models.setdefault(path[0], []).append((dotted(path[1:]) or path[0], array.shape))
        everything.append((dotted(path), array.shape))
        if not array.in_order:
            is_sorted.add(path[0])
    found = [(model, root not in is_sorted) for root, model in models.items()]
    return [*found, (everything, not is_sorted)]
