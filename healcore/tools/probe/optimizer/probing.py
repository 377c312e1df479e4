"""The optimizer probe: are Adam's moments those of a network that learns everywhere?"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from healcore.tools.probe.contents import open_contents
from healcore.tools.probe.optimizer import judging
from healcore.tools.probe.optimizer.kinds import reason
from healcore.tools.probe.optimizer.layers import layer
from healcore.tools.probe.optimizer.naming import Names
from healcore.tools.probe.optimizer.outliers import Deviation, deviations, rounding
from healcore.tools.probe.optimizer.slots import Slot, Tree, slots
from healcore.tools.probe.optimizer.statistics import measured
from healcore.tools.probe.optimizer.thresholds import OptimizerInputs
from healcore.tools.probe.verdict import NothingToProbe, Result, Verdict


def probe_optimizer(path: Path, inputs: OptimizerInputs | None = None) -> Result:
    """Probes the optimizer state in a checkpoint, parameter by parameter.

    Args:
        path: what `open_contents` opens.
        inputs: thresholds.

    Raises:
        NothingToProbe: there is no state of Adam's kind in it; the message says what there is.
        ProbeError: it cannot be read.
    """
    inputs = inputs or OptimizerInputs()
    contents = open_contents(path, inputs.step)
    tree = Tree(contents)
    everything = slots(tree)
    found = [slot for slot in everything if slot.second.size and not _whole(slot)]
    why_not = reason(tree, [array for slot in found for array in (slot.second, *slot.beside)])
    if not found:
        why = _unjudged(everything) or why_not or "it holds no optimizer state that healcore knows"
        raise NothingToProbe(f"{path} has no second moments to judge: {why}")
    names = Names(tree, found)
    moments = [
        measured(slot, names.of(slot), names.like(slot), inputs.beta2, _step(inputs))
        for slot in found
    ]
    age = judging.step(moments, inputs)
    checks = [age, judging.finite(moments, inputs)]
    compared: list[Deviation] = []
    noise: set[str] = set()
    if age.verdict is Verdict.PASS:
        judged = [each for each in moments if each.step is None or each.step >= inputs.min_step]
        noise = rounding(judged)
        compared = deviations(
            each for each in judged if not each.negative and each.name not in noise
        )
        checks += [judging.dead(judged, inputs), judging.outliers(compared, inputs)]
    facts = {
        "format": contents.format,
        "parameters": len(moments),
        "elements": sum(each.size for each in moments),
        "step": max((each.step for each in moments if each.step is not None), default=None),
        "nonfinite": [each.name for each in moments if each.nonfinite],
        "negative": [each.name for each in moments if each.negative],
        "dead": [each.name for each in moments if each.dead],
        "top": _top(compared, inputs),
    }
    notes = [*contents.notes]
    if why_not is not None:
        notes.append(f"some states were not judged: {why_not}")
    if noise:
        few = ", ".join(sorted(noise)[:3])
        notes.append(
            f"{len(noise)} parameters get no more than rounding errors and are not compared, as a "
            f"bias before a norm does: {few}"
        )
    if names.by_order:
        notes.append("names are those of the model's parameters, in its order")
    if names.missing:
        notes.append("torch numbers parameters: those whose name is not certain have a number")
    return Result("optimizer", str(path), tuple(checks), facts, tuple(notes))


def _whole(slot: Slot) -> bool:
    """Whether the moments are whole numbers."""
    return slot.second.dtype.startswith(("int", "uint", "bool"))


def _unjudged(left_out: Sequence[Slot]) -> str | None:
    """Why nothing can be said of moments that are there."""
    if not left_out:
        return None
    kinds = sorted({slot.second.dtype for slot in left_out if _whole(slot)})
    if not kinds:
        return "none of them has an element"
    return f"they are whole numbers ({', '.join(kinds)}): quantized, or no moments"


def _step(inputs: OptimizerInputs) -> float | None:
    return None if inputs.global_step is None else float(inputs.global_step)


def _top(compared: Sequence[Deviation], inputs: OptimizerInputs) -> list[dict[str, Any]]:
    """The layers that are farthest from their like, each with its farthest parameter."""

    def rank(each: Deviation) -> tuple[bool, float]:
        return not judging.is_outlier(each, inputs), -abs(each.sigmas)

    farthest: dict[str, Deviation] = {}
    for each in compared:
        of = layer(each.name)
        if of not in farthest or rank(each) < rank(farthest[of]):
            farthest[of] = each
    ranked = sorted(farthest.items(), key=lambda pair: rank(pair[1]))
    return [
        {
            "layer": of,
            "parameter": each.name,
            "gradient_rms": each.rms,
            "ratio": each.ratio,
            "sigmas": each.sigmas,
            "outlier": judging.is_outlier(each, inputs),
        }
        for of, each in ranked[: inputs.top]
    ]
