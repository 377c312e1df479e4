"""The optimizer probe: checks by Adam's moments that every layer learns."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore.tools.probe.child import probe_paths
from healcore.tools.probe.formats import TRAINING_FACTS, open_contents
from healcore.tools.probe.inputs import OptimizerInputs
from healcore.tools.probe.layers import Deviation, deviations, find_rounding, name_parameters
from healcore.tools.probe.moments import Moments, Tree, find_moments
from healcore.tools.probe.result import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    Check,
    NothingToProbe,
    ProbeResult,
    first_three,
    score,
)


def probe_optimizer(path: str | Path, inputs: OptimizerInputs | None = None) -> ProbeResult:
    """Probes the optimizer state in a checkpoint (any path that `open_contents` opens).

    The verdict is ERROR if the path cannot be read, SKIP without an Adam-like optimizer.
    """
    return probe_paths("optimizer", judge, [path], inputs or OptimizerInputs())[0]


def judge(path: Path, inputs: OptimizerInputs) -> ProbeResult:
    """Runs the probe in the current process, without limits. Raises any exception for damage."""
    contents = open_contents(path, inputs.step)
    beside = path.parent.glob("*model.safetensors") if path.stem == "optimizer" else ()
    weights = [open_contents(file) for file in sorted(beside) if path.is_file()]
    tree = Tree(contents, weights)
    found = find_moments(tree)
    moments = [each for each in found if each.second.size and "int" not in each.second.dtype]
    if not moments:
        why = "; ".join([_no_moments(tree, found), *contents.notes])
        raise NothingToProbe(f"{path} has no second moments to judge: {why}")
    training = _training(tree)
    step = training.get("global_step") if inputs.global_step is None else inputs.global_step
    name_parameters(tree, moments)
    for each in moments:
        each.measure(None if step is None else float(step))
    age = _step(moments, inputs)
    checks = [age, _finite(moments, inputs)]
    compared: list[Deviation] = []
    noise: set[str] = set()
    if age.verdict is PASS:
        judged = [each for each in moments if each.step is None or each.step >= inputs.min_step]
        noise = find_rounding(judged)
        similar = [each for each in judged if not each.negative and each.name not in noise]
        compared = deviations(similar, inputs.outlier_ratio, inputs.outlier_sigmas)
        checks += [_dead(judged, inputs), _outliers(compared, inputs)]
    facts = {
        "format": contents.format,
        "score": score(checks, ("step", "finite")),
        "parameters": len(moments),
        "elements": sum(each.size for each in moments),
        "step": max((each.step for each in moments if each.step is not None), default=None),
        "training": training,
        "nonfinite": [each.name for each in moments if each.nonfinite],
        "negative": [each.name for each in moments if each.negative],
        "dead": [each.name for each in moments if each.dead],
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


# -- facts -----------------------------------------------------------------------------------------


def _training(tree: Tree) -> dict[str, Any]:
    """Returns the values of `TRAINING_FACTS` in the checkpoint, each from its shortest path."""
    found: dict[str, Any] = {}
    for path, value in sorted(tree.values.items(), key=lambda pair: len(pair[0])):
        known = bool(path) and path[-1] in TRAINING_FACTS
        if known and isinstance(value, (bool, int, float)) and not abs(value) > 1e300:
            found.setdefault(path[-1], value)
    return {name: found[name] for name in TRAINING_FACTS if name in found}


def _no_moments(tree: Tree, found: Sequence[Moments]) -> str:
    """Reason why no state can be judged."""
    if found:
        kinds = first_three(sorted({state.second.dtype for state in found}))
        return f"they have no elements, or are integers ({kinds}): quantized moments"
    names = sorted({path[-1] for path in tree.arrays if "state" in path[:-1]})
    saved = f", only {', '.join(names[:8])}" if names else ""
    return f"it holds no exp_avg_sq of torch, and no mu and nu of optax{saved}"


# -- checks ----------------------------------------------------------------------------------------


def _top(compared: Sequence[Deviation], inputs: OptimizerInputs) -> list[dict[str, Any]]:
    """Returns the layers with the largest deviations, outliers first."""
    farthest: dict[str, Deviation] = {}
    for each in sorted(compared, key=lambda each: (not each.outlier, -abs(each.sigmas))):
        farthest.setdefault(each.layer, each)
    return [each._asdict() for each in [*farthest.values()][: inputs.top]]


def _finite(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Counts NaN, Inf and negative second moments, which make the parameter NaN in a step."""
    bad = [each for each in moments if each.nonfinite or each.negative]
    bound = inputs.fail_nonfinite
    if not bad:
        message = f"the moments of all {len(moments)} parameters are finite"
        return Check("finite", PASS, message, 0, bound)
    what = "NaN or Inf" if any(each.nonfinite for each in bad) else "below 0"
    message = (
        f"the moments of {len(bad)} of {len(moments)} parameters are not finite or below 0 "
        f"({what} in {first_three([each.name for each in bad])})"
    )
    return Check("finite", FAIL if len(bad) >= bound else WARN, message, len(bad), bound)


def _step(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    known = [each.step for each in moments if each.step is not None]
    bound, undecided = inputs.min_step, FAIL if inputs.fail_young else SKIP
    if not known:
        message = "the state does not contain its step: pass --global-step"
        return Check("step", undecided, message, None, bound)
    invalid = next((number for number in known if not math.isfinite(number)), None)
    if invalid is not None:
        message = f"step is {invalid:g}, which is not a number of updates"
        return Check("step", FAIL, message, invalid, bound)
    latest = max(known)
    if not latest >= bound:
        message = f"step {latest:g}: second moments cannot be judged before step {bound}"
        return Check("step", undecided, message, latest, bound)
    young = sum(number < bound for number in known)
    note = f"; {young} parameters have fewer steps and are not judged" if young else ""
    return Check("step", PASS, f"step {latest:g}{note}", latest, bound)


def _dead(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Finds parameters whose gradients were always 0."""
    layers = {each.layer for each in moments}
    dead = [each.name for each in moments if each.dead]
    dead_layers = {each.layer for each in moments if each.dead}
    fraction, bound = len(dead_layers) / len(layers), inputs.fail_dead
    if not dead:
        return Check("dead", PASS, "every parameter has had gradients", 0.0, bound)
    message = (
        f"the second moments of {len(dead)} of {len(moments)} parameters are all 0, in "
        f"{len(dead_layers)} of {len(layers)} layers: they never had a gradient "
        f"({first_three(dead)})"
    )
    failed = fraction > bound or len(dead) == len(moments)
    return Check("dead", FAIL if failed else WARN, message, fraction, bound)


def _outliers(compared: Sequence[Deviation], inputs: OptimizerInputs) -> Check:
    """Finds layers whose gradients are far larger or smaller than those in similar layers."""
    bound = inputs.fail_outliers
    if not compared:
        message = "fewer than 4 parameters can be compared"
        return Check("outliers", SKIP, message, None, bound, decides=False)
    far = sorted((each for each in compared if each.outlier), key=lambda each: -abs(each.sigmas))
    if not far:
        most = max(compared, key=lambda each: abs(math.log(each.ratio)))
        message = f"none; the farthest is {most.parameter}, {_compared(most)}"
        return Check("outliers", PASS, message, 0.0, bound)
    layers, far_layers = {each.layer for each in compared}, {each.layer for each in far}
    # The embedding and the head have no similar layers, so risen layers exclude them.
    similar = {each.layer for each in compared if each.similar}
    risen = {each.layer for each in far if each.risen}
    fraction = max(len(far_layers) / len(layers), len(risen) / max(1, len(similar)))
    together = f", {len(risen)} of {len(similar)} similar layers" if risen else ""
    message = (
        f"{len(far_layers)} of {len(layers)} layers{together}: "
        f"{far[0].parameter} has {_compared(far[0])}"
    )
    return Check("outliers", FAIL if fraction > bound else WARN, message, fraction, bound)


def _compared(each: Deviation) -> str:
    times = f"{each.ratio:.3g} times" if each.ratio >= 1 else f"1/{1 / each.ratio:.3g} of"
    return f"{times} the second moment of similar parameters ({each.sigmas:+.1f} sigma)"
