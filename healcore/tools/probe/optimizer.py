"""The optimizer probe: checks by Adam's moments that every layer learns.

Layers are compared with each other. Similar parameters have the same name in other layers and the
same shape. Without names, they have the same place in repeated blocks. A healthy bias has other
gradients than a healthy embedding.

With three or more similar parameters, log v-hat is compared with their median. The unit is the
median absolute deviation over all parameters, or over the similar parameters if that is larger.
Without similar parameters, log v-hat is compared with all parameters in a coarser unit, because the
embedding of a healthy network may have 400 times the median.

If the moments of many layers rise together, the median is among the risen moments. So if the layers
form groups, the lowest group is the baseline (`_lowest_group`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore.checkpoint_contents import Contents
from healcore.console import first_of
from healcore.tools.probe.checkpoint_files import open_contents
from healcore.tools.probe.checks import (
    FAIL,
    MAD_TO_SIGMA,
    PASS,
    SKIP,
    WARN,
    Check,
    NothingToProbe,
    OptimizerInputs,
    ProbeResult,
    score,
)
from healcore.tools.probe.moments import Moments, Shape, Tree, find_moments, name_parameters

_TRAINING_FACTS = ("global_step", "epoch", "best_val_loss", "best_metric", "use_qlora")
"""Numbers and flags that trainers save with a checkpoint."""
_DAMAGE = ("nonfinite", "negative", "dead")
"""Kinds of damaged moments."""
_MIN_SIMILAR, _MIN_PARAMETERS = 3, 4
_MIN_SPREAD = 0.1
"""Lower bound of the spread of log v-hat among similar parameters, which may hardly differ."""
_MIN_SPREAD_OF_ALL = 1.5
"""Lower bound of the spread of log v-hat among all parameters, which differ in kind."""
_LOG_ROUNDING = math.log(1e-10)
"""log v-hat of rounding errors relative to the largest in the layer: 1e-5 of the gradient."""
_MIN_GAP = math.log(10)
"""Smallest distance of two groups of layers, because healthy layers differ gradually."""
_MAX_SCORE_IF_DEAD = 0.3
"""Largest score of an optimizer whose moments are 0: its layers have not been trained."""
_RISEN_FRACTION = 0.3
"""If a larger fraction of the layers is above the lowest group, that group is the baseline."""


def probe_optimizer(path: Path, inputs: OptimizerInputs) -> ProbeResult:
    """Runs the probe in the current process, without limits of memory and time.

    `healcore probe optimizer` runs it in a child process (`checkpoint_files.probe_paths`), because
    a damaged file can crash the libraries that read it.

    Args:
        path: a checkpoint with the state of an optimizer: a file of torch, a directory of DCP,
            Orbax or a trainer, or a store of healcore. The names of the parameters of
            `optimizer.pt` are read from `model.safetensors` next to it.
        inputs: the bounds of the checks, the checkpoint of a store, and how many layers to list.

    Returns:
        The checks "step" and "finite". If the optimizer is old enough for a verdict, also "dead"
        and "outliers", and the layers that deviate most.

    Raises:
        NothingToProbe: there are no second moments to judge.
        ProbeError: the checkpoint does not exist or cannot be read.
        Exception: any exception for a damaged file, see `checks.run_probe`.
    """
    contents = open_contents(path, inputs.step)
    weights: list[Contents] = []
    if path.stem == "optimizer" and path.is_file():
        for file in sorted(path.parent.glob("*model.safetensors")):
            weights.append(open_contents(file))
    tree = Tree(contents, weights)
    found = find_moments(tree)
    moments = [each for each in found if each.second.size and "int" not in each.second.dtype]
    if not moments:
        why = "; ".join([_no_moments(tree, found), *contents.notes])
        raise NothingToProbe(f"{path} has no second moments to judge: {why}")
    training = _training(tree)
    step = training.get("global_step") if inputs.global_step is None else inputs.global_step
    name_parameters(tree, moments)
    for moment in moments:
        moment.measure(step)
    age = _step(moments, inputs)
    checks = [age, _finite(moments, inputs)]
    compared: list[Deviation] = []
    noise: set[str] = set()
    if age.verdict is PASS:
        judged = [each for each in moments if each.step is None or each.step >= inputs.min_step]
        noise = _rounding(judged)
        compared = _deviations(
            [each for each in judged if not each.negative and each.name not in noise], inputs
        )
        checks += [_dead(judged, inputs), _outliers(compared, inputs)]
    facts = {
        "format": contents.format,
        "score": score(checks, ("step", "finite"), upper_bounds={"dead": _MAX_SCORE_IF_DEAD}),
        "parameters": len(moments),
        "elements": sum(moment.size for moment in moments),
        "step": max(_known_steps(moments), default=None),
        "training": training,
        **{flag: [m.name for m in moments if getattr(m, flag)] for flag in _DAMAGE},
        "top": _top(compared, inputs),
    }
    notes = [*contents.notes]
    if training:
        notes.append(", ".join(f"{name} {value}" for name, value in training.items()))
    if noise:
        first = ", ".join(sorted(noise)[:3])
        notes.append(
            f"{len(noise)} parameters have only rounding errors as gradients, like a bias before a "
            f"norm, and are not compared: {first}"
        )
    return ProbeResult("optimizer", str(path), tuple(checks), facts, tuple(notes))


def _training(tree: Tree) -> dict[str, Any]:
    """The values of `_TRAINING_FACTS` in the checkpoint, each from its shortest path."""
    values: dict[str, Any] = {}
    for path, value in sorted(tree.values.items(), key=lambda pair: len(pair[0])):
        if path and isinstance(value, (bool, int, float)) and not abs(value) > 1e300:
            values.setdefault(path[-1], value)
    return {name: values[name] for name in _TRAINING_FACTS if name in values}


def _no_moments(tree: Tree, found: Sequence[Moments]) -> str:
    """Reason why no state can be judged."""
    if found:
        kinds = first_of(sorted({state.second.dtype for state in found}))
        return f"they have no elements, or are integers ({kinds}): quantized moments"
    names = sorted({path[-1] for path in tree.arrays if "state" in path[:-1]})
    reason = "it holds no exp_avg_sq of torch, and no mu and nu of optax"
    if names:
        reason += f", only {', '.join(names[:8])}"
    return reason


def _known_steps(moments: Sequence[Moments]) -> list[float]:
    """The numbers of updates, for the parameters that have this number in their state."""
    return [moment.step for moment in moments if moment.step is not None]


class Deviation(NamedTuple):
    """Comparison of one parameter with similar parameters.

    v-hat is the bias-corrected mean of the second moments, and its square root is a typical
    gradient of the parameter. An outlier has far larger or smaller gradients than similar layers.
    `str` gives the sentence for messages.
    """

    layer: str
    """Name of the layer."""
    parameter: str
    """Name of the parameter in the layer."""
    gradient_rms: float
    """Square root of v-hat."""
    ratio: float
    """The v-hat of the parameter divided by the v-hat of similar parameters."""
    sigmas: float
    """Logarithm of `ratio` in robust standard deviations."""
    outlier: bool
    """Whether both `ratio` and `sigmas` exceed their bounds, in either direction."""
    similar: bool
    """Whether the parameter has at least two similar parameters."""
    risen: bool
    """Whether the layer is in a group of layers above the baseline."""

    def __str__(self) -> str:
        if self.ratio >= 1:
            times = f"{self.ratio:.3g} times"
        else:
            times = f"1/{1 / self.ratio:.3g} of"
        return f"{times} the second moment of similar parameters ({self.sigmas:+.1f} sigma)"


def _rounding(moments: Iterable[Moments]) -> set[str]:
    """Names the parameters whose gradients are rounding errors, such as a bias before a norm."""
    logs = _logs(moments)
    largest: dict[str, float] = {}
    for moment, log in logs:
        largest[moment.layer] = max(log, largest.get(moment.layer, log))
    return {each.name for each, log in logs if log - largest[each.layer] < _LOG_ROUNDING}


def _deviations(moments: Iterable[Moments], inputs: OptimizerInputs) -> list[Deviation]:
    """Compares parameters that are not dead; returns an empty list for fewer than four."""
    logs = _logs(moments)
    if len(logs) < _MIN_PARAMETERS:
        return []
    members: dict[tuple[str, Shape], list[tuple[str, float]]] = defaultdict(list)
    for moment, log in logs:
        members[moment.kind].append((moment.layer, log))
    all_logs = np.array([log for _, log in logs])
    centre = float(np.median(all_logs))
    spread_of_all = _spread(all_logs - centre, _MIN_SPREAD_OF_ALL)
    levels: dict[tuple[str, Shape], tuple[float, set[str], np.ndarray]] = {}
    for kind, similar in members.items():
        if len(similar) < _MIN_SIMILAR:
            continue
        if kind[0]:
            baseline = _lowest_group(similar)
        else:
            # Parameters without a name or a place may be of any layer, which has no level.
            baseline = {layer for layer, _ in similar}
        own = np.array([log for layer, log in similar if layer in baseline])
        level = float(np.median(own))
        levels[kind] = level, baseline, own - level
    spread_within = _MIN_SPREAD
    if levels:
        residuals = [residual for _, _, residual in levels.values()]
        spread_within = _spread(np.concatenate(residuals), _MIN_SPREAD)
    spreads: dict[tuple[str, Shape], float] = {}
    for kind, (*_, residual) in levels.items():
        # Some parameters vary more between layers than others (the first bias of a block).
        # Parameters that share only their shape may have different roles, as in an adapter.
        least = spread_of_all
        if kind[0]:
            least = spread_within
        spreads[kind] = _spread(residual, least)
    compared: list[Deviation] = []
    for moment, log in logs:
        level, baseline, _ = levels.get(moment.kind, (centre, {moment.layer}, None))
        distance = log - level
        sigmas = distance / spreads.get(moment.kind, spread_of_all)
        far = abs(distance) > math.log(inputs.outlier_ratio)
        compared.append(
            Deviation(
                moment.layer,
                moment.name,
                gradient_rms=math.exp(log / 2),
                ratio=math.exp(min(distance, 700.0)),
                sigmas=sigmas,
                outlier=far and abs(sigmas) > inputs.outlier_sigmas,
                similar=moment.kind in levels,
                risen=moment.layer not in baseline and distance > 0,
            )
        )
    return compared


def _logs(moments: Iterable[Moments]) -> list[tuple[Moments, float]]:
    """Pairs moments with log v-hat, without moments whose mean is not positive."""
    return [(each, log) for each in moments if (log := each.log_v_hat) is not None]


def _lowest_group(layer_logs: Iterable[tuple[str, float]]) -> set[str]:
    """The layers of the lowest group, or all layers if few layers are above that group.

    A group has at least two layers, and a gap of `_MIN_GAP` separates it from the next group.

        log v-hat   -14.2 -14.0 -13.9          -9.1 -9.0 -8.8
                    |-- lowest group --|  gap  |-- risen ---|

    If most layers have risen, the median of all layers is among the risen layers, and the layers
    that did not rise would look like outliers.
    """
    logs: dict[str, list[float]] = defaultdict(list)
    for layer, log in layer_logs:
        logs[layer].append(log)
    levels = sorted((float(np.median(values)), layer) for layer, values in logs.items())
    parts = [levels[:1]]  # the layers between two gaps
    for before, level in pairwise(levels):
        if level[0] - before[0] > _MIN_GAP:
            parts.append([])
        parts[-1].append(level)
    groups = [part for part in parts if len(part) > 1]
    has_risen = sum(map(len, groups[1:])) > _RISEN_FRACTION * len(levels)
    return {layer for _, layer in (groups[0] if has_risen else levels)}


def _spread(values: Sequence[float] | np.ndarray, least: float) -> float:
    """The robust standard deviation of values around 0, at least `least`."""
    return max(MAD_TO_SIGMA * float(np.median(np.abs(values))), least)


def _top(compared: Sequence[Deviation], inputs: OptimizerInputs) -> list[dict[str, Any]]:
    """The layers with the largest deviations, outliers first."""
    farthest: dict[str, Deviation] = {}
    for each in sorted(compared, key=lambda each: (not each.outlier, -abs(each.sigmas))):
        farthest.setdefault(each.layer, each)
    return [each._asdict() for each in [*farthest.values()][: inputs.top]]


def _finite(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Counts NaN, Inf and negative second moments, which make the parameter NaN in a step."""
    bad = [moment for moment in moments if moment.nonfinite or moment.negative]
    bound = inputs.fail_nonfinite
    if not bad:
        message = f"the moments of all {len(moments)} parameters are finite"
        return Check("finite", PASS, message, 0, bound)
    message = (
        f"the moments of {len(bad)} of {len(moments)} parameters are not finite or below 0 "
        f"({first_of([each.name for each in bad])})"
    )
    verdict = WARN
    if len(bad) >= bound:
        verdict = FAIL
    return Check("finite", verdict, message, len(bad), bound)


def _step(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Checks that the moments are old enough for a verdict.

    The second moments of Adam are averages over many steps, and begin with single gradients.
    """
    known = _known_steps(moments)
    bound = inputs.min_step
    undecided = SKIP
    if inputs.fail_young:
        undecided = FAIL
    if not known:
        message = "the state does not contain its step: pass --global-step"
        return Check("step", undecided, message, None, bound)
    for step in known:
        if not math.isfinite(step):
            message = f"step is {step:g}, which is not a number of updates"
            return Check("step", FAIL, message, step, bound)
    latest = max(known)
    if not latest >= bound:
        message = f"step {latest:g}: second moments cannot be judged before step {bound}"
        return Check("step", undecided, message, latest, bound)
    message = f"step {latest:g}"
    young = sum(step < bound for step in known)
    if young:
        message += f"; {young} parameters have fewer steps and are not judged"
    return Check("step", PASS, message, latest, bound)


def _dead(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Finds parameters whose gradients were always 0."""
    layers = {each.layer for each in moments}
    dead = [each.name for each in moments if each.dead]
    dead_layers = {each.layer for each in moments if each.dead}
    fraction = len(dead_layers) / len(layers)
    bound = inputs.fail_dead
    if not dead:
        return Check("dead", PASS, "every parameter has had gradients", 0.0, bound)
    message = (
        f"the second moments of {len(dead)} of {len(moments)} parameters are all 0, in "
        f"{len(dead_layers)} of {len(layers)} layers: they never had a gradient "
        f"({first_of(dead)})"
    )
    verdict = WARN
    if fraction > bound or len(dead) == len(moments):
        verdict = FAIL
    return Check("dead", verdict, message, fraction, bound)


def _outliers(compared: Sequence[Deviation], inputs: OptimizerInputs) -> Check:
    """Finds layers whose gradients are far larger or smaller than in similar layers."""
    bound = inputs.fail_outliers
    if not compared:
        message = "fewer than 4 parameters can be compared"
        return Check("outliers", SKIP, message, None, bound, decides=False)
    far = [deviation for deviation in compared if deviation.outlier]
    far.sort(key=lambda deviation: -abs(deviation.sigmas))
    if not far:
        extreme = max(compared, key=lambda each: abs(math.log(each.ratio)))
        message = f"none; the farthest is {extreme.parameter}, {extreme}"
        return Check("outliers", PASS, message, 0.0, bound)
    layers = {each.layer for each in compared}
    # Without the embedding and the head, which have no similar layers.
    similar = {each.layer for each in compared if each.similar}
    far_layers = {each.layer for each in far}
    risen = {each.layer for each in far if each.risen}
    fraction = max(len(far_layers) / len(layers), len(risen) / max(1, len(similar)))
    verdict = WARN
    if fraction > bound:
        verdict = FAIL
    message = f"{len(far_layers)} of {len(layers)} layers"
    if risen:
        message += f", {len(risen)} of {len(similar)} similar layers"
    message += f": {far[0].parameter} has {far[0]}"
    return Check("outliers", verdict, message, fraction, bound)
