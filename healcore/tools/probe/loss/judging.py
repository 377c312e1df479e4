"""From what was measured of a curve to verdicts."""

from __future__ import annotations

import math
from collections.abc import Callable

from healcore.tools.probe.loss.events import Events
from healcore.tools.probe.loss.reduction import Finiteness, Reduction
from healcore.tools.probe.loss.shape import Shape
from healcore.tools.probe.loss.thresholds import LossInputs
from healcore.tools.probe.verdict import Check, Verdict

PASS, WARN, FAIL, SKIP = Verdict.PASS, Verdict.WARN, Verdict.FAIL, Verdict.SKIP

_SMOOTHNESS_NEEDS = 30

Told = Callable[[float], float]
"""A number of the curve that is judged (lower is better) as one of the curve that was logged."""


def finite(found: Finiteness, inputs: LossInputs) -> Check:
    """NaN and Inf: at the end they are the run's end, before it they were survived."""
    bad, of = found.nonfinite, found.values
    name, bound = "finite", inputs.max_nonfinite
    if found.trailing:
        last = "value is" if found.trailing == 1 else f"{found.trailing} values are"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {of} in all)"
        return Check(name, FAIL, message, bad, bound)
    if bad > bound:
        message = f"{bad} of {of} values are NaN or Inf, the first at step {found.first_step:.15g}"
        return Check(name, WARN, message, bad, bound)
    message = f"all {of} values are finite" if not bad else f"{bad} of {of} values are NaN or Inf"
    return Check(name, PASS, message, bad, bound)


def progress(seen: Shape, reduction: Reduction, inputs: LossInputs, told: Told) -> Check:
    """Whether it went the right way at all: by its trend, or by its end against its start."""
    name, bound = "progress", inputs.trend_sigmas
    way = f"from {told(seen.start):.4g} to {told(seen.end):.4g}"
    rise, of_noise = seen.end - seen.start, math.sqrt(2) * seen.noise
    apart = rise / of_noise if of_noise > 0 else math.copysign(math.inf, rise) if rise else 0.0
    wrong, right = ("rises", "falls") if inputs.goal == "down" else ("falls", "rises")
    if not reduction.level.variance > 0:
        message = f"it never changes: {told(seen.end):.4g} at every step"
        return Check(name, WARN, message, told(seen.trend), bound)
    measured = (
        f"trend {told(seen.trend):+.1f} sigma, end against start {told(apart):+.1f} sigma; "
        f"either counts from {bound:g} on"
    )
    if rise and max(seen.trend * math.copysign(1, rise), abs(apart)) > bound:
        # The number that decided.
        by_trend = seen.trend * math.copysign(1, rise) > bound
        value = told(seen.trend if by_trend else apart)
        verdict, goes = (FAIL, wrong) if rise > 0 else (PASS, right)
        return Check(name, verdict, f"it {goes}, {way} ({measured})", value, bound)
    if seen.drop > bound:
        message = (
            f"it {right} within its first values, the first is {seen.drop:.1f} sigma away, and "
            f"holds {told(seen.end):.4g}"
        )
        return Check(name, PASS, message, seen.drop, bound)
    value = told(max(seen.trend, apart, key=abs))
    if abs(seen.trend) > bound:  # the other way than its ends
        message = f"{way}, and a trend the other way ({measured})"
    else:
        message = f"{way}: no more than its noise ({measured})"
    if reduction.signed:
        # The loss of a policy gradient is about 0 by construction, and says nothing of progress.
        return Check(name, PASS, f"{message}; it takes both signs, so it need not", value, bound)
    return Check(name, WARN, f"{message}: nothing is learnt", value, bound)


def ratio(seen: Shape, reduction: Reduction, inputs: LossInputs) -> Check:
    """The end over the start."""
    name, bound = "convergence_ratio", inputs.max_convergence_ratio
    if inputs.goal == "up" or reduction.best <= 0 or seen.start <= 0:
        message = "only losses above 0 that should fall have one"
        return Check(name, SKIP, message, None, bound, decides=False)
    value = seen.end / seen.start
    noise = math.sqrt(2) * inputs.trend_sigmas * seen.noise / seen.start if bound >= 1 else 0.0
    verdict = WARN if value > bound + noise else PASS
    message = f"the end is {value:.4g} of the start, at most {bound:g} is wanted"
    return Check(name, verdict, message, value, bound)


def regret(seen: Shape, inputs: LossInputs, told: Told) -> Check:
    """How much of what was won is lost again."""
    name, bound = "regret", [inputs.warn_regret, inputs.fail_regret]
    lost = seen.relative_regret
    if lost is None:
        message = "it was never better than at its start"
        return Check(name, SKIP, message, None, bound, decides=False)
    # The best of many medians is below the curve by its noise alone; hence twice the usual bound.
    if seen.regret <= 2 * inputs.trend_sigmas * seen.noise:
        message = f"it ends at its best, {told(seen.best):.4g}, up to its noise"
        return Check(name, PASS, message, lost, bound)
    verdict = FAIL if lost > bound[1] else WARN if lost > bound[0] else PASS
    message = (
        f"at the end {lost:.1%} of the way to its best ({told(seen.best):.4g}) is lost again; "
        f"WARN above {bound[0]:.0%}, FAIL above {bound[1]:.0%}"
    )
    return Check(name, verdict, message, lost, bound)


def smoothness(reduction: Reduction, inputs: LossInputs) -> Check:
    """1 - var(dL) / var(L)."""
    name, bound, value = "smoothness", inputs.min_smoothness, reduction.smoothness
    if value is None:
        message = "a curve that does not change has none"
        return Check(name, SKIP, message, None, bound, decides=False)
    message = f"{value:.3f}, at least {bound:g} is wanted (noise around a level has -1)"
    # Of noise alone its standard deviation is 2 / sqrt(n): of a few values it may be anything.
    many = reduction.finite >= _SMOOTHNESS_NEEDS
    return Check(name, WARN if value < bound else PASS, message, value, bound, decides=many)


def events(found: Events, inputs: LossInputs) -> Check:
    """Loss spikes that lasted."""
    name, bound = "instability_events", inputs.max_events
    jumps = f"{found.jumps} single high value{'s' * (found.jumps != 1)} beside"
    if not found.count:
        return Check(name, PASS, f"none ({jumps})", 0, bound)
    first = found.found[0]
    times = "1 time" if found.count == 1 else f"{found.count} times"
    message = (
        f"{times} it was far above where it had been, first at step {first.step:.15g} for "
        f"{first.values} values ({jumps})"
    )
    if found.unfinished is not None:
        message += f"; it ends in the one that began at step {found.unfinished.step:.15g}"
        return Check(name, FAIL, message, found.count, bound)
    return Check(name, WARN if found.count > bound else PASS, message, found.count, bound)


def final(seen: Shape, inputs: LossInputs, told: Told) -> Check:
    """The loss that it ends with."""
    value, bound = told(seen.end), inputs.max_final_loss
    if bound is None:
        return Check("final_loss", PASS, f"{value:.6g}, no bound is set", value)
    bad = value > bound if inputs.goal == "down" else value < bound
    wanted = "at most" if inputs.goal == "down" else "at least"
    message = f"{value:.6g}, {wanted} {bound:g} is wanted"
    return Check("final_loss", FAIL if bad else PASS, message, value, bound)
