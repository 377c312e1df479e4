"""From measured moments to verdicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from healcore.tools.probe.optimizer.layers import layer
from healcore.tools.probe.optimizer.outliers import Deviation
from healcore.tools.probe.optimizer.statistics import Moments
from healcore.tools.probe.optimizer.thresholds import OptimizerInputs
from healcore.tools.probe.verdict import Check, Verdict

PASS, WARN, FAIL, SKIP = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.SKIP


def finite(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """NaN, Inf, and second moments below 0: the next step makes NaN of the parameter."""
    bad = [each for each in moments if each.nonfinite or each.negative]
    bound = inputs.fail_nonfinite
    if not bad:
        return Check("finite", PASS, f"the moments of all {len(moments)} are finite", 0, bound)
    what = "NaN or Inf" if any(each.nonfinite for each in bad) else "below 0"
    message = (
        f"the moments of {len(bad)} of {len(moments)} parameters are not finite or below 0 "
        f"({what} in {_named([each.name for each in bad])})"
    )
    return Check("finite", FAIL if len(bad) >= bound else WARN, message, len(bad), bound)


def step(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Whether it has gone on for long enough to be judged."""
    known = [each.step for each in moments if each.step is not None]
    if not known:
        message = "the state does not say at which step it is: pass --global-step"
        return Check("step", SKIP, message, None, inputs.min_step)
    odd = next((number for number in known if not math.isfinite(number)), None)
    if odd is not None:
        message = f"step is {odd:g}, which counts no updates"
        return Check("step", FAIL, message, odd, inputs.min_step)
    latest = max(known)
    if not latest >= inputs.min_step:
        message = (
            f"step {latest:g}: before step {inputs.min_step} second moments say too little to be "
            "judged"
        )
        return Check("step", SKIP, message, latest, inputs.min_step)
    young = sum(1 for number in known if number < inputs.min_step)
    beside = f"; {young} are younger than {inputs.min_step} and not judged" if young else ""
    return Check("step", PASS, f"step {latest:g}{beside}", latest, inputs.min_step)


def dead(moments: Sequence[Moments], inputs: OptimizerInputs) -> Check:
    """Parameters that never had a gradient other than 0."""
    layers = {layer(each.name) for each in moments}
    gone = [each.name for each in moments if each.dead]
    of = {layer(name) for name in gone}
    part, bound = len(of) / len(layers), inputs.fail_dead
    if not gone:
        return Check("dead", PASS, "every parameter has had gradients", 0.0, bound)
    message = (
        f"the second moments of {len(gone)} of {len(moments)} parameters are all 0, in "
        f"{len(of)} of {len(layers)} layers: they never had a gradient ({_named(gone)})"
    )
    all_of_them = len(gone) == len(moments)
    return Check("dead", FAIL if part > bound or all_of_them else WARN, message, part, bound)


def outliers(found: Sequence[Deviation], inputs: OptimizerInputs) -> Check:
    """Layers whose gradients are of another size than those of their like."""
    name, bound = "outliers", inputs.fail_outliers
    if not found:
        message = "fewer than 4 parameters can be compared"
        return Check(name, SKIP, message, None, bound, decides=False)
    far = [each for each in found if is_outlier(each, inputs)]
    layers = {layer(each.name) for each in found}
    of = {layer(each.name) for each in far}
    part = len(of) / len(layers)
    if not far:
        most = max(found, key=lambda each: abs(math.log(each.ratio)))
        message = f"none; the farthest is {most.name}, {told(most)}"
        return Check(name, PASS, message, 0.0, bound)
    far.sort(key=lambda each: -abs(each.sigmas))
    message = f"{len(of)} of {len(layers)} layers: {far[0].name} has {told(far[0])}"
    return Check(name, FAIL if part > bound else WARN, message, part, bound)


def is_outlier(each: Deviation, inputs: OptimizerInputs) -> bool:
    """Whether it is far away both in standard deviations and as a factor."""
    far = abs(math.log(each.ratio)) > math.log(inputs.outlier_ratio)
    return far and abs(each.sigmas) > inputs.outlier_sigmas


def told(each: Deviation) -> str:
    """In words how it compares."""
    times = f"{each.ratio:.3g} times" if each.ratio >= 1 else f"1/{1 / each.ratio:.3g} of"
    return f"{times} the second moment of its like ({each.sigmas:+.1f} sigma)"


def _named(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
