"""The optimizer probe: do all layers learn, by the second moments of Adam?

A parameter is compared with similar ones: the same parameter of other layers, with the same shape.
Without similar ones it is compared with all parameters in a coarser unit, because the embedding of
a healthy network may have 400 times the median.

A torch optimizer state has numbers instead of names, in the order in which the program passed the
parameters. A name is used only if it is certain, because a wrong name points to the wrong layer.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from healcore.checkpoint_contents import Array
from healcore.console import first_of
from healcore.tools.probe.checkpoint_files import open_contents
from healcore.tools.probe.checks import (
    FAIL,
    PASS,
    SKIP,
    Check,
    NothingToProbe,
    OptimizerInputs,
    Report,
    check,
    score,
)

Keys = tuple[str, ...]
_TRAINING_FACTS = ("global_step", "epoch", "best_val_loss", "best_metric", "use_qlora")
"""Numbers and flags that trainers save with a checkpoint."""
_BETA2 = 0.999
"""Decay of the second moments. Another value matters only between parameters of other ages."""
_NUMBER = re.compile(r"\d+")
_MIN_SIMILAR, _MIN_PARAMETERS = 3, 4
_LOG_ROUNDING = np.log(1e-10)
"""log v-hat of rounding errors relative to the largest in the layer: 1e-5 of the gradient."""
_LEVEL = 0.4
"""Quantile that is the level of similar parameters. More than half of the layers may rise together,
and the median would be among them."""
_LEVEL_TO_SIGMA = 1.9
"""Standard deviation of Gaussian noise divided by this quantile of the distances from the level."""
_LEAST_SIMILAR, _LEAST = 0.1, 1.5
"""Smallest standard deviation of log v-hat among similar parameters, and among all."""
_MOST = {"step": 0.0, "finite": 0.0, "dead": 0.3}
"""Largest score of an optimizer that fails a check."""


@dataclass
class _Parameter:
    """One parameter of an optimizer with second moments, and what was measured in its moments."""

    optimizer: Keys
    """Keys that lead to the optimizer's state."""
    key: str
    """Dotted path of the parameter, or its number."""
    arrays: list[Array]
    """The second moments, then other moments, which must also be finite."""
    step: float
    """Number of updates, NaN if unknown."""
    group: str = ""
    """Index of its group of parameters."""
    name: str = ""
    layer: str = ""
    kind: tuple[Any, ...] = ()
    """Equal for the same parameter of similar layers; empty if unknown."""
    nonfinite: bool = False
    """Whether any moment is NaN or Inf, or a second moment below 0, as no average of squares is."""
    dead: bool = False
    """Whether every gradient so far was exactly 0."""
    log: float = -np.inf
    """Log of v-hat, the bias-corrected mean of the second moments."""

    @property
    def shape(self) -> tuple[int, ...]:
        return self.arrays[0].shape

    def measure(self) -> None:
        """Reads the moments. Only numbers are kept, because a large model fills the memory."""
        second, *_ = values = [array.read() for array in self.arrays]
        self.nonfinite = not (
            np.min(second) >= 0 and all(np.isfinite(each).all() for each in values)
        )
        self.dead = not second.any()
        # Adam's averages begin at 0. The division makes them comparable at any age (Kingma and Ba,
        # 2015, section 3).
        correction = 1.0
        if self.step > 0:
            correction = 1 - _BETA2**self.step
        mean = second[np.isfinite(second)].mean(dtype=np.float64)
        self.log = float(np.log(mean / correction))


def probe_optimizer(path: Path, inputs: OptimizerInputs) -> Report:
    """Runs the probe in the current process, without limits of memory and time.

    `healcore probe optimizer` runs it in a child process (`checkpoint_files.probe_paths`), because
    a damaged file can crash the libraries that read it.

    Args:
        path: a checkpoint with the state of an optimizer: a file of torch, a directory of DCP,
            Orbax or a trainer, or a store of healcore. `optimizer.pt` is read with the files next
            to it, which have the names of the parameters.
        inputs: the bounds of the checks, the checkpoint of a store, and how many layers to list.

    Returns:
        The checks "step" and "finite". If the optimizer is old enough for a verdict, also "dead"
        and "outliers", and the layers that deviate most.

    Raises:
        NothingToProbe: there are no second moments to judge.
        ProbeError: the checkpoint does not exist or cannot be read.
        Exception: any exception for a damaged file, see `checks.run_probe`.
    """
    opened = path
    if path.name == "optimizer.pt" and path.is_file():
        opened = path.parent
    contents = open_contents(opened, inputs.step)
    leaves = contents.leaves
    parameters = list(_find_parameters(leaves))
    if not parameters:
        why = "; ".join([f"{path} has no exp_avg_sq of torch and no nu of optax", *contents.notes])
        raise NothingToProbe(why)
    _set_names(leaves, parameters)
    training: dict[str, Any] = {}
    for keys, value in sorted(leaves.items(), key=lambda pair: len(pair[0])):
        if keys[-1] in _TRAINING_FACTS and isinstance(value, (bool, int, float)):
            training.setdefault(keys[-1], value)
    notes = [f"{name} {value}" for name, value in training.items()]
    global_step = inputs.global_step
    if global_step is None:
        global_step = training.get("global_step", np.nan)
    with np.errstate(all="ignore"):
        for each in parameters:
            if np.isnan(each.step):
                each.step = global_step
            each.measure()
    step = max((each.step for each in parameters if not np.isnan(each.step)), default=None)
    facts: dict[str, Any] = {
        "format": contents.format,
        "parameters": len(parameters),
        "step": step,
        "training": training,
        "top": (),
    }
    for flag in ("nonfinite", "dead"):
        facts[flag] = [each.name for each in parameters if getattr(each, flag)]
    bad = facts["nonfinite"]
    message = f"{len(bad)} parameters have moments that are not finite or below 0: {first_of(bad)}"
    checks = [check("finite", len(bad), bad, len(bad) >= inputs.fail_nonfinite, message)]
    if step is not None and step >= inputs.min_step:
        checks.append(Check("step", PASS, f"step {step:g}", step))
        judged = [each for each in parameters if not each.step < inputs.min_step]
        dead = [each for each in judged if each.dead]
        share = len({each.layer for each in dead}) / len({each.layer for each in judged})
        message = (
            f"all second moments are 0 in {share:.0%} of the layers: {first_of(facts['dead'])}"
        )
        fail = share > inputs.fail_dead or len(dead) == len(judged)
        checks.append(check("dead", share, dead, fail, message))
        levels = [each for each in judged if np.isfinite(each.log)]
        largest = {each.layer: each.log for each in sorted(levels, key=lambda each: each.log)}
        usual = [each for each in levels if each.log - largest[each.layer] > _LOG_ROUNDING]
        if len(usual) < len(levels):
            notes.append(
                f"{len(levels) - len(usual)} parameters have only rounding errors as gradients, "
                "like a bias before a norm, and are not compared"
            )
        if len(usual) >= _MIN_PARAMETERS:
            rows = _compare(usual, inputs)
            facts["top"] = rows[: inputs.top]
            far = [row["parameter"] for row in rows if row["outlier"]]
            share = len(far) / len(rows)
            message = f"{len(far)} of {len(rows)} layers: {first_of(far)}"
            checks.append(check("outliers", share, far, share > inputs.fail_outliers, message))
    else:
        verdict = SKIP
        if inputs.fail_young:
            verdict = FAIL
        message = f"step {step}: not judged before step {inputs.min_step}; pass --global-step"
        checks.insert(0, Check("step", verdict, f"{message} if the state lacks it", step))
    total = score(checks, _MOST)
    return Report("optimizer", str(path), tuple(checks), facts, (*contents.notes, *notes), total)


def _compare(parameters: Sequence[_Parameter], inputs: OptimizerInputs) -> list[dict[str, Any]]:
    """Compares parameters, and returns the farthest parameter of each layer, outliers first."""
    logs = np.array([each.log for each in parameters])
    distance = logs - np.median(logs)
    unit = np.full(len(logs), max(_spread(distance), _LEAST))
    kinds: dict[tuple[Any, ...], list[int]] = {}
    for at, each in enumerate(parameters):
        if each.kind:
            kinds.setdefault(each.kind, []).append(at)
    similar = [members for members in kinds.values() if len(members) >= _MIN_SIMILAR]
    for members in similar:
        distance[members] = logs[members] - np.quantile(logs[members], _LEVEL)
    for members in similar:
        # Some parameters vary more between layers than others (the first bias of a block).
        spreads = _spread(distance[members]), _spread(distance[np.concatenate(similar)])
        unit[members] = max(*spreads, _LEAST_SIMILAR)
    sigmas = distance / unit
    far = (abs(sigmas) > inputs.outlier_sigmas) & (abs(distance) > np.log(inputs.outlier_ratio))
    rows: dict[str, dict[str, Any]] = {}
    for at in np.lexsort((-abs(sigmas), ~far)).tolist():
        row = {
            "layer": parameters[at].layer,
            "parameter": parameters[at].name,
            "ratio": float(np.exp(distance[at])),
            "sigmas": float(sigmas[at]),
            "outlier": bool(far[at]),
        }
        rows.setdefault(parameters[at].layer, row)
    return list(rows.values())


def _spread(distances: np.ndarray) -> float:
    """The robust standard deviation of values, from their distances to their level."""
    return _LEVEL_TO_SIGMA * float(np.quantile(abs(distances), _LEVEL))


# -- where the moments are, and of which parameter -------------------------------------------------


def _find_parameters(leaves: Mapping[Keys, Any]) -> Iterator[_Parameter]:
    """Yields the parameters of Adam-like optimizers in a checkpoint.

    OPTIMIZER.state.PARAMETER.exp_avg_sq    torch; bitsandbytes has "state2"
    OPTIMIZER.nu.PARAMETER                  optax, with "mu" of the same structure
    """
    places: dict[tuple[Keys, str], Keys] = {}
    for path, value in leaves.items():
        if path[-4:-3] == ("param_groups",) and path[-2] == "params":
            places[path[:-4], str(value)] = path[-3:]
    for path, array in leaves.items():
        if not isinstance(array, Array) or "float" not in array.dtype or not array.size:
            continue  # the 8-bit states of bitsandbytes are integers
        if path[-1] in ("exp_avg_sq", "state2") and "state" in path:
            at = len(path) - 1 - path[::-1].index("state")
            parameter, count = path[at + 1 : -1], (*path[:-1], "step")
            others = [(*path[:-1], slot) for slot in ("exp_avg", "max_exp_avg_sq", "state1")]
        elif "nu" in path:
            at = path.index("nu")
            parameter, count = path[at + 1 :], (*path[:at], "count")
            others = [(*path[:at], slot, *parameter) for slot in ("mu", "nu_max")]
        else:
            continue
        optimizer = path[:at]
        key = name = ".".join(parameter).removesuffix(".value")  # of flax.nnx
        group, _, place = places.get((optimizer, key), ("", "", ""))
        settings = (*optimizer, "param_groups", group)
        if key.isdecimal():
            name = leaves.get((*settings, "param_names", place), "")
        step = _number(leaves, count, (*count, "value"), (*settings, "step"))
        arrays = [array, *(leaves[other] for other in others if other in leaves)]
        if len(arrays) > 1:
            yield _Parameter(optimizer, key, arrays, step, group, name)


def _number(leaves: Mapping[Keys, Any], *paths: Keys) -> float:
    """The first of some paths that has a number, or an array of one element; NaN without one."""
    for path in paths:
        value = leaves.get(path)
        if isinstance(value, Array) and value.size == 1:
            value = value.read()[0]
        if isinstance(value, (int, float, np.number)):
            return float(value)
    return np.nan


def _set_names(leaves: Mapping[Keys, Any], parameters: Sequence[_Parameter]) -> None:
    """Sets the name, layer and kind of the parameters.

    A name comes from the state itself if it has names, or from weights in the checkpoint with the
    same shapes in the same order. A parameter without a certain name is called by its number.
    """
    optimizers = {each.optimizer for each in parameters}
    models = _models(leaves, optimizers)
    unnamed: dict[tuple[Keys, str], list[_Parameter]] = {}
    for each in parameters:
        if not each.name:
            unnamed.setdefault((each.optimizer, each.group), []).append(each)
    for members in unnamed.values():
        members.sort(key=lambda each: int(each.key))
        shapes = [each.shape for each in members]
        names = max((_match(shapes, model) for model in models), key=len, default={})
        for at, each in enumerate(members):
            each.name = names.get(at, "")
    for each in parameters:
        name = each.name
        if name:
            each.layer = _layer_of(name)
            layer = _NUMBER.sub("*", each.layer)
            each.kind = (each.optimizer, layer, name.removeprefix(each.layer), each.shape)
        else:
            name = each.layer = f"group {each.group}, parameter {each.key}"
        if len(optimizers) > 1:
            name, each.layer = (
                f"{'.'.join(each.optimizer)}: {text}" for text in (name, each.layer)
            )
        each.name = name


def _models(leaves: Mapping[Keys, Any], optimizers: set[Keys]) -> list[dict[str, Array]]:
    """Possible models: the weights outside optimizers, by name, for each top-level key."""
    models: dict[str, dict[str, Array]] = {}
    seen = set()
    for path, leaf in leaves.items():
        if not isinstance(leaf, Array) or "float" not in leaf.dtype or "running" in path[-1]:
            continue
        inside = any(path[: len(each)] == each for each in optimizers if each)
        if not inside and (leaf.storage is None or leaf.storage not in seen):
            seen.add(leaf.storage)
            models.setdefault(path[0], {})[".".join(path[1:]) or path[0]] = leaf
    return list(models.values())


def _match(shapes: Sequence[tuple[int, ...]], model: Mapping[str, Array]) -> dict[int, str]:
    """Finds the names of the parameters of a group, by index.

    The k-th parameter of a shape is the k-th weight of this shape, if there are equally many.
    """
    found: dict[int, str] = {}
    for shape in set(shapes):
        places = [at for at, each in enumerate(shapes) if each == shape]
        names = [name for name, each in model.items() if each.shape == shape]
        if len(names) == len(places):
            if not all(each.in_order for each in model.values()):
                names = _names_in_layers(names)
            found |= zip(places, names, strict=False)
    return found


def _names_in_layers(names: Sequence[str]) -> list[str]:
    """Brings the sorted names of weights of one shape into the order of the program.

    safetensors files and adapters (PEFT) are sorted by name, which loses the order within a layer.
    So the place in the layer replaces the name if a layer has several such weights. Returns an
    empty list if it is not certain that each layer has the same weights.
    """
    layers = Counter(map(_layer_of, names))
    kinds = {_NUMBER.sub("*", layer) for layer in layers}
    if len(kinds) > 1 or "*" not in str(kinds) or len({*layers.values()}) > 1:
        return []
    found: list[str] = []
    for layer in sorted(layers, key=lambda layer: list(map(int, _NUMBER.findall(layer)))):
        same = [name for name in names if _layer_of(name) == layer]
        if len(same) > 1:
            same = [f"{layer}.*{place}" for place in range(len(same))]
        found += same
    return found


def _layer_of(name: str) -> str:
    """The layer: the name up to the first part with a number, such as `layers.3`."""
    numbered = re.match(r"[^\d]*\d[^.]*", name)
    if numbered:
        return numbered[0]
    return name.rpartition(".")[0] or name
