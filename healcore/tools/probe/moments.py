"""Adam's moments in a checkpoint, and the names of their parameters.

A torch optimizer state has numbers instead of names, in the order in which the program passed the
parameters. A name is used only if it is certain, because a wrong name points to the wrong layer.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from healcore.checkpoint_contents import Array, Contents

Keys = tuple[str, ...]
Shape = tuple[int, ...]
Model = list[tuple[str, Shape]]
"""Names and shapes of parameters."""

_WRAPPERS = ("value", "raw_value")  # keys under which flax.nnx stores an array
_BETA2 = 0.999  # Adam's beta2 if the state does not contain it, as the states of optax
_NUMBER = re.compile(r"\d+")
_MIN_BLOCKS, _MAX_BLOCK_SIZE = 3, 256
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Tree:
    """The contents of a checkpoint by path, and the weights in files next to an optimizer's."""

    def __init__(self, contents: Contents, weights: Sequence[Contents] = ()) -> None:
        self.values: Mapping[Keys, Any] = contents.leaves
        self.arrays: dict[Keys, Array] = {}
        for path, array in contents.arrays.items():
            is_wrapped = len(path) > 1 and path[-1] in _WRAPPERS
            self.arrays[path[:-1] if is_wrapped else path] = array
        for contents in weights:
            self.arrays |= {("weights", *path): array for path, array in contents.arrays.items()}
        self.groups: dict[Keys, dict[str, str]] = {}
        """Index of the parameter group by optimizer and parameter, in the optimizer's order."""
        for path, value in self.values.items():
            if path[-4:-3] == ("param_groups",) and path[-2] == "params":
                self.groups.setdefault(path[:-4], {})[str(value)] = path[-3]

    def number(self, *paths: Keys) -> float | None:
        """The first value saved as a number or as an array of one element, or None."""
        for path in paths:
            value = self.values.get(path)
            if isinstance(value, (int, float)) and not isinstance(value, bool):
                return float(value) if abs(value) < 1e300 else math.inf
            array = self.arrays.get(path)
            if array is not None and array.size == 1:
                return float(array.read()[0])
        return None


@dataclass
class Moments:
    """Adam's moments of one parameter."""

    optimizer: Keys
    key: str  # dotted path of the parameter, or its number
    second: Array
    others: tuple[Array | None, ...]  # the other moments, which must also be finite
    step: float | None  # number of updates, or None if the state lacks the value
    beta2: float = _BETA2

    name: str = ""
    """Name of the parameter, or its group and number."""
    layer: str = ""
    """Layer of the parameter, or the numbers of the parameters in the same block."""
    kind: tuple[str, Shape] = ("", ())
    """Key for comparisons: equal for the same parameter of similar layers, "" if unknown."""

    size: int = 0
    nonfinite: bool = False  # whether any moment is NaN or Inf
    negative: bool = False  # whether a second moment is below 0, as no average of squares can be
    dead: bool = False  # whether every gradient so far was exactly 0
    mean: float = math.nan  # mean of the finite second moments

    def set_name(self, name: str) -> None:
        """Sets the name, and the layer and the kind that follow from it."""
        self.name, self.layer = name, _layer_of(name)
        self.kind = (_NUMBER.sub("*", name), self.second.shape)

    def measure(self, step: float | None) -> None:
        """Reads the moments. `step` is the default for a missing value."""
        self.step = step if self.step is None else self.step
        second = self.second.read()
        if np.iscomplexobj(second):
            # For a complex parameter, torch averages squares of real and imaginary parts.
            second = second.view(np.real(second).dtype)
        finite = second[np.isfinite(second)]
        others = [array.read() for array in self.others if array is not None]
        self.size = len(second)
        self.nonfinite = not all(np.isfinite(each).all() for each in (second, *others))
        self.negative = bool((finite < 0).any())
        self.dead = len(second) > 0 and not second.any()
        self.mean = float(finite.mean(dtype=np.float64)) if len(finite) else math.nan

    @property
    def log_v_hat(self) -> float | None:
        """Log of the bias-corrected mean second moment, or None if the mean is not positive."""
        if not 0 < self.mean < math.inf:
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def find_moments(tree: Tree) -> list[Moments]:
    """Finds the moments of Adam-like optimizers: torch, then optax, in saved order."""
    return [*_torch_moments(tree), *_optax_moments(tree)]


def _torch_moments(tree: Tree) -> Iterator[Moments]:
    for path, array in tree.arrays.items():
        # bitsandbytes names the moments state1 and state2; its 8-bit states are integers.
        if path[-1] == "exp_avg_sq":
            names = ("exp_avg", "max_exp_avg_sq")
        elif path[-1] == "state2" and "float" in array.dtype:
            names = ("state1",)
        else:
            continue
        state = path[:-1]
        last = len(state) - 1
        at = max((at for at, key in enumerate(state[:-1]) if key == "state"), default=last)
        optimizer, key = state[:at], ".".join(state[at + 1 :] or state[at:])
        group = tree.groups.get(optimizer, {}).get(key, key)
        hyper = (*optimizer, "param_groups", *group.split("."))
        others = tuple(tree.arrays.get((*state, name)) for name in names)
        step = tree.number((*state, "step"), (*hyper, "step"))
        beta2 = tree.number((*hyper, "betas", "1"))
        yield Moments(optimizer, key, array, others, step, _BETA2 if beta2 is None else beta2)


def _optax_moments(tree: Tree) -> Iterator[Moments]:
    for path, array in tree.arrays.items():
        for at in (at for at, name in enumerate(path) if name == "nu"):
            optimizer, parameter = path[:at], path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is not None and first.shape == array.shape:
                others = (first, tree.arrays.get((*optimizer, "nu_max", *parameter)))
                step = tree.number((*optimizer, "count"))
                yield Moments(optimizer, ".".join(parameter), array, others, step)
                break


def name_parameters(tree: Tree, moments: Sequence[Moments]) -> None:
    """Sets the name, layer and kind of the parameters."""
    optimizers: dict[Keys, dict[str, Moments]] = {}
    for moment in moments:
        optimizers.setdefault(moment.optimizer, {})[moment.key] = moment
    models = _models(tree, list(optimizers))
    for optimizer, members in optimizers.items():
        groups: dict[str, list[str]] = {}
        listed = tree.groups.get(optimizer, {})
        for key in dict.fromkeys([*listed, *members]):
            if key.isdecimal():
                groups.setdefault(listed.get(key, "0"), []).append(key)
            elif key in members:
                members[key].set_name(key or "parameter")
        for group, numbers in groups.items():
            place = (*optimizer, "param_groups", group, "param_names")
            names = [tree.values.get((*place, str(at))) for at in range(len(numbers))]
            _name_group(group, numbers, [members.get(number) for number in numbers], names, models)
        if len(optimizers) > 1:
            for member in members.values():
                member.name = f"{'.'.join(optimizer)}: {member.name}"
                member.layer = f"{'.'.join(optimizer)}: {member.layer}"


def _models(tree: Tree, optimizers: Sequence[Keys]) -> list[tuple[Model, bool]]:
    """Possible models, the arrays outside optimizers by top-level key.

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


def _name_group(
    group: str,
    numbers: Sequence[str],
    members: Sequence[Moments | None],
    names: Sequence[str | None],
    models: Sequence[tuple[Model, bool]],
) -> None:
    """Names the parameters of one group. A parameter without state is None."""
    shapes = [member and member.second.shape for member in members]
    if not all(names):
        equal = [model for model, ordered in models if ordered and _has_shapes(model, shapes)]
        names = [name for name, _ in equal[0]] if equal else [None] * len(shapes)
    matches = filter(None, (_layers_of(model, shapes) for model, _ in models))
    layers, (start, size, count) = next(matches, ([], _find_blocks(shapes)))
    # A pair of low-rank matrices is an adapter of one projection. Projections are not alike.
    is_low_rank = size == 2 and _is_low_rank(*shapes[start : start + 2])
    for at, (number, member, name) in enumerate(zip(numbers, members, names, strict=True)):
        if member is None:
            continue
        if name:
            member.set_name(name)
            continue
        shape = member.second.shape
        member.name = member.layer = f"group {group}, parameter {number}"
        member.kind = ("", shape)
        block, place = divmod(at - start, size) if size else (-1, 0)
        if not 0 <= block < count or (not layers and is_low_rank):
            continue
        member.kind = (f"group {group}, place {place}", shape)
        if layers:
            member.layer, layer = layers[block]
            same = [name for name, of in layer if of == shape]
            member.name = same[0]
            if len(same) > 1:
                member.name = f"{_common_name(same, member.layer)} (parameter {number})"
        elif size > 1:
            first, last = numbers[at - place], numbers[at - place + size - 1]
            member.layer = f"group {group}, parameters {first} to {last}"


def _is_low_rank(first: Shape | None, second: Shape | None) -> bool:
    """Whether the product of two matrices, (r, n) and (m, r), has a lower rank than m and n."""
    if first is None or second is None or len(first) != 2 or len(second) != 2:
        return False
    return first[0] == second[1] < min(first[1], second[0])


def _common_name(names: Sequence[str], layer: str) -> str:
    """The parts that all names share: `layers.0.*.lora_A` of its query and its value."""
    parts = [name.split(".") for name in names]
    if len({*map(len, parts)}) > 1:
        return f"{layer}.*"
    columns = zip(*parts, strict=True)
    return ".".join(column[0] if len({*column}) == 1 else "*" for column in columns)


def _layer_of(name: str) -> str:
    """The layer: the name up to the first part with a number, such as `layers.3`."""
    parts = name.split(".")
    for at, part in enumerate(parts):
        if _NUMBER.search(part):
            return ".".join(parts[: at + 1])
    return ".".join(parts[:-1]) or name


def _has_shapes(model: Model, shapes: Sequence[Shape | None]) -> bool:
    """Whether the model has these shapes; an unknown shape is None."""
    return len(shapes) == len(model) and all(
        shape in (None, known) for shape, (_, known) in zip(shapes, model, strict=True)
    )


def _layers_of(
    model: Model, shapes: Sequence[Shape | None]
) -> tuple[list[tuple[str, Model]], tuple[int, int, int]] | None:
    """The model's layers and a block of `shapes` for each, or None if no blocks match.

    safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the order of the layers
    and loses the order of the parameters within a layer.
    """
    by_layer: dict[str, Model] = {}
    for name, shape in model:
        if _NUMBER.search(_layer_of(name)):
            by_layer.setdefault(_layer_of(name), []).append((name, shape))
    if len({_NUMBER.sub("*", name) for name in by_layer}) != 1:
        return None
    layers = sorted(by_layer.items(), key=lambda pair: list(map(int, _NUMBER.findall(pair[0]))))
    blocks = _find_blocks(shapes)
    start, size, count = blocks if blocks[2] == len(layers) else _find_blocks(shapes, len(layers))
    for at, (_, layer) in zip(range(start, start + count * size, size or 1), layers, strict=False):
        block, known = Counter(shapes[at : at + size]), Counter(shape for _, shape in layer)
        # Two equal blocks may be chance, unless they are whole layers.
        if not block <= known or (count < _MIN_BLOCKS and block != known):
            return None
    return (layers, (start, size, count)) if count else None


def _find_blocks(shapes: Sequence[Shape | None], layers: int = 0) -> tuple[int, int, int]:
    """Finds the longest run of at least three consecutive blocks with equal shapes.

    The layers of most networks have equal shapes, so such blocks are taken for layers. If the
    number of layers is given, only runs of exactly that many whole blocks count, which may be two.
    Returns the first parameter, the size of a block, and the number of blocks; zeros without a run.
    """
    least = min(max(layers, 2), _MIN_BLOCKS) if layers else _MIN_BLOCKS
    numbers = {shape: at for at, shape in enumerate(dict.fromkeys(shapes))}
    kinds = np.array([numbers[shape] for shape in shapes])
    best, blocks = 0, (0, 0, 0)
    for size in range(1, min(len(kinds) // least, _MAX_BLOCK_SIZE) + 1):
        edges = np.diff((kinds[size:] == kinds[:-size]).astype(int), prepend=0, append=0)
        begins, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
        runs = ((int(end - begin), int(begin)) for begin, end in zip(begins, ends, strict=True))
        length, begin = max(runs, key=lambda run: run[0], default=(0, 0))
        count = length // size + 1
        if length > best and count >= least and (not layers or length == (layers - 1) * size):
            best, blocks = length, (begin, size, count)
    return blocks
