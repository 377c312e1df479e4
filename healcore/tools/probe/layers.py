"""Names the parameters of an optimizer state, and compares the layers with each other.

A torch optimizer state has numbers instead of names, in the order in which the program passed the
parameters. A name is used only if it is certain, because a wrong name points to the wrong layer.

Similar parameters have the same name in other layers and the same shape. Without names, they have
the same place in repeated blocks. A healthy bias has other gradients than a healthy embedding.

With three or more similar parameters, log v-hat is compared with their median. The unit is the
median absolute deviation over all parameters, or over the similar parameters if that is larger.
Without similar parameters, log v-hat is compared with all parameters in a coarser unit, because the
embedding of a healthy network may have 400 times the median.

If the moments of many layers rise together, the median is among the risen moments. So if the layers
form groups, the lowest group is the baseline (`_lowest_group`).
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from healcore.tools.probe.loss_curve import MAD_TO_SIGMA
from healcore.tools.probe.moments import Moments, Shape, Tree

Model = list[tuple[str, Shape]]
"""Names and shapes of parameters."""

_NUMBER = re.compile(r"\d+")
_MIN_BLOCKS, _MAX_BLOCK_SIZE = 3, 256
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")

_MIN_SIMILAR, _MIN_PARAMETERS = 3, 4
_MIN_SPREAD = 0.1
"""Lower bound of the spread of log v-hat among similar parameters, which may hardly differ."""
_MIN_SPREAD_OF_ALL = 1.5
"""Lower bound of the spread of log v-hat among all parameters, which differ in kind."""
_LOG_ROUNDING = math.log(1e-10)
"""log v-hat of rounding errors relative to the largest in the layer: 1e-5 of the gradient."""
_MIN_GAP = math.log(10)
"""Smallest distance of two groups of layers, because healthy layers differ gradually."""
_RISEN_FRACTION = 0.3
"""If a larger fraction of the layers is above the lowest group, that group is the baseline."""


# -- names -----------------------------------------------------------------------------------------


def name_parameters(tree: Tree, moments: Sequence[Moments]) -> None:
    """Sets the name, layer and kind of the parameters."""
    optimizers: dict[tuple[str, ...], dict[str, Moments]] = {}
    for each in moments:
        optimizers.setdefault(each.optimizer, {})[each.key] = each
    models = _models(tree, list(optimizers))
    for optimizer, members in optimizers.items():
        groups: dict[str, list[str]] = {}
        listed = tree.groups.get(optimizer, {})
        for key in dict.fromkeys([*listed, *members]):
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
                each.name = f"{'.'.join(optimizer)}: {each.name}"
                each.layer = f"{'.'.join(optimizer)}: {each.layer}"


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
    if not all(names):
        equal = [model for model, ordered in models if ordered and _has_shapes(model, shapes)]
        names = [name for name, _ in equal[0]] if equal else [None] * len(shapes)
    found = filter(None, (_layers_of(model, shapes) for model, _ in models))
    layers, (start, size, count) = next(found, ([], find_blocks(shapes)))
    for at, (number, each, name) in enumerate(zip(numbers, members, names, strict=True)):
        if each is None:
            continue
        if name:
            _set_name(each, name)
            continue
        shape = each.second.shape
        each.name = each.layer = f"group {group}, parameter {number}"
        each.kind = ("", shape)
        block, place = divmod(at - start, size) if size else (-1, 0)
        if not 0 <= block < count:
            continue
        each.kind = (f"group {group}, place {place}", shape)
        if layers:
            each.layer, layer = layers[block]
            same = [name for name, of in layer if of == shape]
            unknown = f"{each.layer}.* (parameter {number})"
            each.name = same[0] if len(same) == 1 else unknown
        elif size > 1:
            first, last = numbers[at - place], numbers[at - place + size - 1]
            each.layer = f"group {group}, parameters {first} to {last}"


def find_blocks(shapes: Sequence[Shape | None], layers: int = 0) -> tuple[int, int, int]:
    """Finds the longest run of at least three consecutive blocks with equal shapes.

    The layers of most networks have equal shapes, so such blocks are taken for layers. If the
    number of layers is given, only runs of exactly that many whole blocks count.

    Returns:
        The first parameter, the size of a block, and the number of blocks; zeros without a run.
    """
    numbers = {shape: at for at, shape in enumerate(dict.fromkeys(shapes))}
    kinds = np.array([numbers[shape] for shape in shapes])
    best, blocks = 0, (0, 0, 0)
    for size in range(1, min(len(kinds) // _MIN_BLOCKS, _MAX_BLOCK_SIZE) + 1):
        edges = np.diff((kinds[size:] == kinds[:-size]).astype(int), prepend=0, append=0)
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        begin, end = max(
            zip(begins, ends, strict=True), key=lambda run: run[1] - run[0], default=(0, 0)
        )
        length = int(end - begin)
        count = length // size + 1
        if length > best and count >= _MIN_BLOCKS and (not layers or length == (layers - 1) * size):
            best, blocks = length, (int(begin), size, count)
    return blocks


def _has_shapes(model: Model, shapes: Sequence[Shape | None]) -> bool:
    """Whether the model has these shapes; an unknown shape is None."""
    return len(shapes) == len(model) and all(
        shape in (None, known) for shape, (_, known) in zip(shapes, model, strict=True)
    )


def _layers_of(
    model: Model, shapes: Sequence[Shape | None]
) -> tuple[list[tuple[str, Model]], tuple[int, int, int]] | None:
    """Returns the model's layers and a block of `shapes` for each, or None if no blocks match.

    safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the order of the layers
    and loses the order of the parameters within a layer.
    """
    by_layer: dict[str, Model] = {}
    for name, shape in model:
        if _NUMBER.search(layer_of(name)):
            by_layer.setdefault(layer_of(name), []).append((name, shape))
    if len({_NUMBER.sub("*", name) for name in by_layer}) != 1:
        return None
    layers = sorted(by_layer.items(), key=lambda pair: list(map(int, _NUMBER.findall(pair[0]))))
    blocks = find_blocks(shapes)
    start, size, count = blocks if blocks[2] == len(layers) else find_blocks(shapes, len(layers))
    for at, (_, layer) in zip(range(start, start + count * size, size or 1), layers, strict=False):
        if not Counter(shapes[at : at + size]) <= Counter(shape for _, shape in layer):
            return None
    return (layers, (start, size, count)) if count else None


def _models(tree: Tree, optimizers: Sequence[tuple[str, ...]]) -> list[tuple[Model, bool]]:
    """Returns possible models, the arrays outside optimizers by top-level key.

    Each has a flag for arrays in the program's order.
    """
    models: dict[tuple[str, bool], Model] = {}
    seen = set()
    for path, array in tree.arrays.items():
        if any(path[: len(at)] == at for at in optimizers if at) or "float" not in array.dtype:
            continue
        if path[-1] in _BUFFERS or (array.storage is not None and array.storage in seen):
            continue
        seen.add(array.storage)
        model = models.setdefault((path[0], array.in_order), [])
        model.append((".".join(path[1:]) or path[0], array.shape))
    return [(model, in_order) for (_, in_order), model in models.items()]


# -- comparison ------------------------------------------------------------------------------------


class Deviation(NamedTuple):
    """Comparison of one parameter with similar parameters."""

    layer: str
    parameter: str
    gradient_rms: float
    """Square root of v-hat."""
    ratio: float
    """v-hat divided by the v-hat of similar parameters."""
    sigmas: float
    """log(ratio) in robust standard deviations."""
    outlier: bool
    """Whether both `ratio` and `sigmas` exceed their bounds, in either direction."""
    similar: bool
    """Whether the parameter has at least two similar parameters."""
    risen: bool
    """Whether the layer is in a group of layers above the baseline."""


def find_rounding(moments: Iterable[Moments]) -> set[str]:
    """Names the parameters whose gradients are rounding errors, such as a bias before a norm."""
    logs = _logs(moments)
    largest: dict[str, float] = {}
    for each, log in logs:
        largest[each.layer] = max(log, largest.get(each.layer, log))
    return {each.name for each, log in logs if log - largest[each.layer] < _LOG_ROUNDING}


def deviations(
    moments: Iterable[Moments], outlier_ratio: float, outlier_sigmas: float
) -> list[Deviation]:
    """Compares parameters that are not dead; returns an empty list for fewer than four."""
    logs = _logs(moments)
    if len(logs) < _MIN_PARAMETERS:
        return []
    members: dict[tuple[str, Shape], list[tuple[str, float]]] = defaultdict(list)
    for each, log in logs:
        members[each.kind].append((each.layer, log))
    members = {kind: found for kind, found in members.items() if len(found) >= _MIN_SIMILAR}
    centre = float(np.median([log for _, log in logs]))
    spread_of_all = _spread([log - centre for _, log in logs], _MIN_SPREAD_OF_ALL)
    # Parameters without a name or a place may be of any layer, which has no level.
    baselines = {
        kind: _lowest_group(found) if kind[0] else {layer for layer, _ in found}
        for kind, found in members.items()
    }
    by_kind = {
        kind: np.array([log for layer, log in found if layer in baselines[kind]])
        for kind, found in members.items()
    }
    centres = {kind: float(np.median(found)) for kind, found in by_kind.items()}
    residuals = [found - centres[kind] for kind, found in by_kind.items()]
    within = _spread(np.concatenate(residuals), _MIN_SPREAD) if residuals else _MIN_SPREAD
    # Some parameters vary more between layers than others (the first bias of a block).
    spreads = {kind: _spread(found - centres[kind], within) for kind, found in by_kind.items()}
    compared = []
    for each, log in logs:
        distance = log - centres.get(each.kind, centre)
        ratio = math.exp(min(distance, 700.0))
        sigmas = distance / spreads.get(each.kind, spread_of_all)
        outlier = abs(distance) > math.log(outlier_ratio) and abs(sigmas) > outlier_sigmas
        similar = each.kind in members
        risen = similar and each.layer not in baselines[each.kind] and distance > 0
        rms = math.exp(log / 2)
        compared.append(
            Deviation(each.layer, each.name, rms, ratio, sigmas, outlier, similar, risen)
        )
    return compared


def _logs(moments: Iterable[Moments]) -> list[tuple[Moments, float]]:
    return [(each, log) for each in moments if (log := each.log_v_hat) is not None]


def _lowest_group(found: Iterable[tuple[str, float]]) -> set[str]:
    """Returns the layers of the lowest group, or all layers if few layers are above that group.

    A group has at least two layers, and a gap of `_MIN_GAP` separates it from the next group.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for layer, log in found:
        logs[layer].append(log)
    levels = sorted((float(np.median(each)), layer) for layer, each in logs.items())
    groups = [levels[:1]]
    for before, level in pairwise(levels):
        if level[0] - before[0] > _MIN_GAP:
            groups.append([])
        groups[-1].append(level)
    low, *above = [group for group in groups if len(group) > 1] or [levels]
    risen = sum(map(len, above)) > _RISEN_FRACTION * len(levels)
    return {layer for _, layer in (low if risen else levels)}


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    return max(MAD_TO_SIGMA * float(np.median(np.abs(values))), least)
