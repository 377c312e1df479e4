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

_WRAPPERS = ("value", "raw_value")
"""Keys under which flax.nnx stores an array."""
_BETA2 = 0.999
"""Adam's beta2 if the state does not contain beta2, as the states of optax."""
_NUMBER = re.compile(r"\d+")
_MIN_BLOCKS, _MAX_BLOCK_SIZE = 3, 256
_BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


class Tree:
    """The contents of a checkpoint by path, and the weights in files next to an optimizer's.

    A path is the tuple of keys from the root to a value, such as
    ("optimizer", "state", "0", "exp_avg_sq").

    Args:
        contents: the opened checkpoint.
        weights: the opened files of weights in the same directory. Their paths get the first key
            "weights". The names of the parameters are looked up there.
    """

    def __init__(self, contents: Contents, weights: Sequence[Contents] = ()) -> None:
        self.values: Mapping[Keys, Any] = contents.leaves
        self.arrays: dict[Keys, Array] = {}
        for path, array in contents.arrays.items():
            if len(path) > 1 and path[-1] in _WRAPPERS:
                path = path[:-1]
            self.arrays[path] = array
        for file in weights:
            for path, array in file.arrays.items():
                self.arrays["weights", *path] = array
        self.groups: dict[Keys, dict[str, str]] = {}
        """Index of the parameter group by optimizer and parameter, in the optimizer's order."""
        for path, value in self.values.items():
            if path[-4:-3] == ("param_groups",) and path[-2] == "params":
                self.groups.setdefault(path[:-4], {})[str(value)] = path[-3]

    def number(self, *paths: Keys) -> float | None:
        """Reads a number that a framework may store at one of several places.

        Args:
            *paths: where the number may be, preferred places first.

        Returns:
            The first value that is saved as a number or as an array of one element, or None. A
            number of 1e300 or more is infinity, because an int may be too large for a float.
        """
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
    """Adam's moments of one parameter, and what was measured in them.

    `find_moments` fills in where the moments are, `name_parameters` fills in which parameter they
    belong to, and `measure` reads the arrays. Only small numbers are kept of an array, so that the
    moments of a large model are never in memory together.
    """

    optimizer: Keys
    """Keys that lead to the optimizer's state."""
    key: str
    """Dotted path of the parameter, or its number."""
    second: Array
    """The second moments."""
    others: tuple[Array | None, ...]
    """The other moments, which must also be finite."""
    step: float | None
    """Number of updates, or None if the state lacks the value."""
    beta2: float = _BETA2
    """Decay of the second moments."""

    name: str = ""
    """Name of the parameter, or its group and number."""
    layer: str = ""
    """Layer of the parameter, or the numbers of the parameters in the same block."""
    kind: tuple[str, Shape] = ("", ())
    """Key for comparisons: equal for the same parameter of similar layers, "" if unknown."""

    size: int = 0
    """Number of elements."""
    nonfinite: bool = False
    """Whether any moment is NaN or Inf."""
    negative: bool = False
    """Whether a second moment is below 0, as no average of squares can be."""
    dead: bool = False
    """Whether every gradient so far was exactly 0."""
    mean: float = math.nan
    """Mean of the finite second moments."""

    def set_name(self, name: str) -> None:
        """Sets the name, and the layer and the kind that follow from it.

        Args:
            name: dotted name of the parameter, such as "layers.3.mlp.weight". Its layer is
                "layers.3", and its kind is "layers.*.mlp.weight" with the shape.
        """
        self.name = name
        self.layer = _layer_of(name)
        self.kind = (_NUMBER.sub("*", name), self.second.shape)

    def measure(self, step: float | None) -> None:
        """Reads the arrays of the moments, and fills in `size`, `mean` and the flags.

        Args:
            step: number of updates to assume if the state does not contain it, or None if the
                training step is unknown too.
        """
        if self.step is None:
            self.step = step
        second = self.second.read()
        if np.iscomplexobj(second):
            # For a complex parameter, torch averages squares of real and imaginary parts.
            second = second.view(np.real(second).dtype)
        finite = second[np.isfinite(second)]
        self.nonfinite = len(finite) < len(second)
        for array in self.others:
            if array is not None and not np.isfinite(array.read()).all():
                self.nonfinite = True
        self.size = len(second)
        self.negative = bool((finite < 0).any())
        self.dead = len(second) > 0 and not second.any()
        self.mean = float(finite.mean(dtype=np.float64)) if len(finite) else math.nan

    @property
    def log_v_hat(self) -> float | None:
        """Log of the bias-corrected mean second moment, or None if the mean is not positive.

        Adam's averages begin at 0. Dividing by 1 - beta2**step makes them comparable at any age
        (Kingma and Ba, 2015, section 3). If the step is unknown, the mean is not corrected.
        """
        if not 0 < self.mean < math.inf:
            return None
        correction = 1.0
        if self.step is not None and self.step > 0 and 0 < self.beta2 < 1:
            correction = -math.expm1(self.step * math.log(self.beta2))
        return math.log(self.mean) - math.log(correction)


def find_moments(tree: Tree) -> list[Moments]:
    """Finds the moments of Adam-like optimizers in a checkpoint.

    Args:
        tree: the contents. torch stores "exp_avg_sq" for each parameter, bitsandbytes "state2", and
            optax a tree "nu" with the structure of the parameters.

    Returns:
        The moments without names and measurements: first the moments of torch, then the moments of
        optax, in saved order. Empty for an optimizer without second moments, such as SGD.
    """
    return [*_torch_moments(tree), *_optax_moments(tree)]


def _torch_moments(tree: Tree) -> Iterator[Moments]:
    """Yields the moments in states of torch: `OPTIMIZER.state.PARAMETER.exp_avg_sq`."""
    for path, array in tree.arrays.items():
        # bitsandbytes names the moments state1 and state2; its 8-bit states are integers.
        if path[-1] == "exp_avg_sq":
            names = ("exp_avg", "max_exp_avg_sq")
        elif path[-1] == "state2" and "float" in array.dtype:
            names = ("state1",)
        else:
            continue
        state = path[:-1]
        # The place of the last key "state", or of the parameter.
        places = [place for place, key in enumerate(state[:-1]) if key == "state"]
        at = places[-1] if places else len(state) - 1
        optimizer = state[:at]
        key = ".".join(state[at + 1 :] or state[at:])
        group = tree.groups.get(optimizer, {}).get(key, key)
        hyper = (*optimizer, "param_groups", *group.split("."))
        others = tuple(tree.arrays.get((*state, name)) for name in names)
        step = tree.number((*state, "step"), (*hyper, "step"))
        beta2 = tree.number((*hyper, "betas", "1"))
        yield Moments(optimizer, key, array, others, step, _BETA2 if beta2 is None else beta2)


def _optax_moments(tree: Tree) -> Iterator[Moments]:
    """Yields the moments in states of optax: `OPTIMIZER.nu.PARAMETER`, and `OPTIMIZER.mu`."""
    for path, array in tree.arrays.items():
        for at, name in enumerate(path):
            if name != "nu":
                continue
            optimizer = path[:at]
            parameter = path[at + 1 :]
            first = tree.arrays.get((*optimizer, "mu", *parameter))
            if first is not None and first.shape == array.shape:
                others = (first, tree.arrays.get((*optimizer, "nu_max", *parameter)))
                step = tree.number((*optimizer, "count"))
                yield Moments(optimizer, ".".join(parameter), array, others, step)
                break


def name_parameters(tree: Tree, moments: Sequence[Moments]) -> None:
    """Sets the name, layer and kind of the parameters.

    A name comes from the state itself if it has names, or from a model in the checkpoint whose
    parameters have the same shapes in the same order. A parameter without a certain name is called
    by its group and number.

    Args:
        tree: the contents of the checkpoint, with the names of weights.
        moments: the moments of all optimizers. They are changed in place.
    """
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
            _name_group(group, numbers, [members.get(each) for each in numbers], names, models)
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
        is_in_optimizer = any(each and path[: len(each)] == each for each in optimizers)
        if is_in_optimizer or "float" not in array.dtype:
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
    layers: dict[int, tuple[str, list[str], int]] = {}
    for model, is_ordered in models:
        if not all(names) and is_ordered and _has_shapes(model, shapes):
            names = [name for name, _ in model]
        layers = layers or _layers_of(model, shapes)
    start, size, count = _find_blocks(shapes)
    for at, (number, member, name) in enumerate(zip(numbers, members, names, strict=True)):
        if member is None:
            continue
        if name:
            member.set_name(name)
            continue
        shape = member.second.shape
        block, place = divmod(at - start, size)
        member.name = member.layer = f"group {group}, parameter {number}"
        member.kind = ("", shape)
        if at in layers:
            member.layer, same, place = layers[at]
            parts = zip(*(own.split(".") for own in same), strict=False)
            member.name = ".".join(each[0] if len(set(each)) == 1 else "*" for each in parts)
            if len(same) > 1:
                member.name += f" (parameter {number})"
        elif not layers and 0 <= block < count:
            last = numbers[at - place + size - 1]
            member.layer = f"group {group}, parameters {numbers[at - place]} to {last}"
        else:
            continue
        member.kind = (f"group {group}, place {place}", shape)


def _find_blocks(shapes: Sequence[Shape | None]) -> tuple[int, int, int]:
    """Finds the longest run of at least three blocks of parameters with equal shapes.

    The layers of most networks have equal shapes, so such blocks are taken for layers. Blocks of
    two matrices or less may be adapters of projections, which are not alike.

    Returns the first parameter, the size of a block, and the number of blocks, or no blocks.
    """
    longest, blocks = 0, (0, 1, 0)
    for size in range(3, min(len(shapes) // _MIN_BLOCKS, _MAX_BLOCK_SIZE) + 1):
        run = 0
        for at in range(size, len(shapes) + 1):
            if at < len(shapes) and shapes[at] == shapes[at - size]:
                run += 1
                continue
            if run > longest and run >= (_MIN_BLOCKS - 1) * size:
                longest, blocks = run, (at - run - size, size, run // size + 1)
            run = 0
    return blocks


def _layer_of(name: str) -> str:
    """The layer: the name up to the first part with a number, such as `layers.3`."""
    numbered = re.match(r"[^\d]*\d[^.]*", name)
    return numbered[0] if numbered else name.rpartition(".")[0] or name


def _has_shapes(model: Model, shapes: Sequence[Shape | None]) -> bool:
    """Whether the model has these shapes; an unknown shape is None."""
    pairs = zip(shapes, model, strict=False)
    return len(shapes) == len(model) and all(own in (None, shape) for own, (_, shape) in pairs)


def _layers_of(
    model: Model, shapes: Sequence[Shape | None]
) -> dict[int, tuple[str, list[str], int]]:
    """The layer of parameters, the possible names, and the place in the layer; by their index.

    safetensors files and adapters (PEFT) are sorted by name. Sorting keeps the layers and loses the
    order of the parameters within a layer. So the layers are known if there is exactly one place
    where the parameters have the shapes of all layers, one after the other. A group may have only
    some of the shapes.
    """
    by_layer: dict[str, Model] = {}
    for name, shape in model:
        if shape in shapes and _NUMBER.search(_layer_of(name)):
            by_layer.setdefault(_layer_of(name), []).append((name, shape))
    layers = sorted(by_layer.items(), key=lambda each: list(map(int, _NUMBER.findall(each[0]))))
    if len(layers) < 2 or len({_NUMBER.sub("*", name) for name in by_layer}) > 1:
        return {}
    size = len(layers[0][1])
    known = [Counter(shape for _, shape in layer) for _, layer in layers]
    starts: list[int] = []
    for start in range(len(shapes) - size * len(layers) + 1):
        places = range(start, start + size * len(layers), size)
        if known == [Counter(shapes[at : at + size]) for at in places]:
            starts.append(start)
    if len(starts) != 1:
        return {}
    found: dict[int, tuple[str, list[str], int]] = {}
    for at, (name, layer) in enumerate(layers):
        for place in range(size):
            index = starts[0] + at * size + place
            same = [own for own, shape in layer if shape == shapes[index]]
            found[index] = name, same, place
    return found
