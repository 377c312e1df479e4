"""The loss probe: is this the curve of a healthy run?"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from healcore.history.curves import Envelope
from healcore.tools.probe.inputs import LOSS_CHECKS, LossInputs
from healcore.tools.probe.loss_curve import CurveStatistics, Shape, logged, shape
from healcore.tools.probe.loss_events import Events, Incidents
from healcore.tools.probe.result import FAIL, PASS, SKIP, WARN, Check, NothingToProbe, ProbeResult
from healcore.tools.traces.trace import Survey, Trace

_SMOOTHNESS_NEEDS = 30
_ALTERNATES = 3.0
"""Minus the lowest smoothness, which a curve has that alternates between two values."""


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> ProbeResult:
    """Probes the curve of a run in bounded memory. Ignores rows that a resume replaced.

    Raises TraceError if the trace cannot be read, NothingToProbe if it does not log the signal.
    """
    inputs = inputs or LossInputs()
    survey = trace.survey()
    if inputs.signal not in survey.signals:
        there = ", ".join(sorted(survey.signals)) or "nothing that healcore knows"
        raise NothingToProbe(
            f"{trace.name} logs no {inputs.signal}, only {there}: pass --signal for another one, "
            f"or --column {inputs.signal}=NAME if a column has it"
        )
    # The checks assume that lower is better; messages and facts show the numbers as logged.
    sign = 1.0 if inputs.goal == "down" else -1.0
    curve = CurveStatistics()
    events = Events(inputs.event_sigmas, inputs.event_points, inputs.rolling_window)
    # Only for losses: in healthy norms the detector reports many events.
    losses = inputs.signal in ("loss", "eval_loss")
    incidents = Incidents(inputs.event_sigmas, inputs.event_points) if losses else None
    thinned = Envelope(inputs.curve_points)
    by_step = None
    for chunk in logged(trace, inputs.signal):
        if by_step is None:
            by_step = bool((chunk.step == np.rint(chunk.step)).all())
        places = np.rint(chunk.step).astype(np.int64) if by_step else chunk.index
        thinned.add(places, {"value": chunk.value})
        values = curve.add(chunk.step, sign * chunk.value)
        steps = chunk.step[np.isfinite(chunk.value)]
        events.add(steps, values)
        if incidents is not None:
            incidents.add(steps, values)
    events.finish()
    if incidents is not None:
        events.include(incidents.finish())
    places, columns = thinned.thinned()
    facts: dict[str, Any] = {
        "values": curve.values,
        "first_step": curve.first_step,
        "last_step": curve.last_step,
        "last": sign * curve.last if curve.finite else None,
        "best": sign * curve.best if curve.finite else None,
        "nonfinite": curve.nonfinite,
        "events": events.found,
        "jumps": events.jumps,
        "curve": {
            "step" if by_step else "row": places,
            "value": columns.get("value", np.empty(0)),
        },
    }
    checks = _checks(curve, events, inputs, sign, facts)
    facts["score"] = score(checks, inputs)
    return ProbeResult("loss", trace.name, tuple(checks), facts, tuple(_notes(survey)))


def score(checks: Sequence[Check], inputs: LossInputs) -> float | None:
    """How well the curve keeps the bounds, from 0 to 1, or None if it could not be judged.

    The weighted mean over the checks that count: 1 for PASS, 0 for FAIL, and for WARN a number that
    decreases with the distance to the bound. A curve that ends in NaN or Inf has 0.
    """
    counted = [check for check in checks if check.decides and check.name in LOSS_CHECKS]
    if any(check.name == "finite" and check.verdict is FAIL for check in counted):
        return 0.0
    weights = [inputs.weights.get(check.name, 1.0) for check in counted]
    if len(counted) < len(checks) and any(check.name == "length" for check in checks):
        return None
    total = sum(weights)
    kept = sum(map(operator.mul, weights, map(_closeness, counted)))
    return kept / total if total > 0 else None


def _closeness(check: Check) -> float:
    """1 for a check within its bound, 0 for a failed check."""
    if check.verdict is not WARN:
        return float(check.verdict is PASS)
    value, bound = check.value, check.bound
    if check.name == "convergence_ratio":
        return bound / value
    if check.name == "smoothness":
        return max(0.0, (value + _ALTERNATES) / (bound + _ALTERNATES))
    if check.name == "regret":
        return (bound[1] - value) / (bound[1] - bound[0])
    if check.name in ("finite", "instability_events"):
        return (1 + bound) / (1 + value)
    return 0.5  # no progress: its bound is a certainty, not a distance


def _notes(survey: Survey) -> list[str]:
    notes = [str(problem) for problem in survey.problems]
    if survey.problem_count > len(notes):
        notes.append(f"{survey.problem_count - len(notes)} further problems in this trace")
    if survey.stale:
        notes.append(f"{survey.stale} rows were replaced by a resume; the last value counts")
    return notes


def _checks(
    curve: CurveStatistics, events: Events, inputs: LossInputs, sign: float, facts: dict[str, Any]
) -> list[Check]:
    finite = _finite(curve, inputs)
    if curve.finite < inputs.min_steps:
        message = (
            f"{curve.finite} finite value{'s' * (curve.finite != 1)}, at least "
            f"{inputs.min_steps} are needed to judge the curve"
        )
        return [finite, Check("length", SKIP, message, curve.finite, inputs.min_steps)]
    seen = shape(curve.blocks.medians(), inputs.ends)
    facts |= {
        "start": sign * seen.start,
        "end": sign * seen.end,
        "best_so_far": sign * seen.best,
        "regret": seen.regret,
        "noise": seen.noise,
    }
    return [
        finite,
        _final_loss(seen, inputs, sign),
        _progress(seen, curve, inputs, sign),
        _convergence_ratio(seen, curve, inputs),
        _regret(seen, inputs, sign),
        _smoothness(curve, inputs),
        _events(events, inputs),
    ]


def _finite(curve: CurveStatistics, inputs: LossInputs) -> Check:
    """NaN and Inf: FAIL at the end of the curve, at most WARN if the run recovered."""
    bad, of = curve.nonfinite, curve.values
    name, bound = "finite", inputs.max_nonfinite
    if curve.trailing:
        last = "value is" if curve.trailing == 1 else f"{curve.trailing} values are"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {of} in all)"
        return Check(name, FAIL, message, bad, bound)
    if bad > bound:
        message = (
            f"{bad} of {of} values are NaN or Inf, the first at step {curve.first_nonfinite:.15g}"
        )
        return Check(name, WARN, message, bad, bound)
    message = f"all {of} values are finite" if not bad else f"{bad} of {of} values are NaN or Inf"
    return Check(name, PASS, message, bad, bound)


def _final_loss(seen: Shape, inputs: LossInputs, sign: float) -> Check:
    value, bound = sign * seen.end, inputs.max_final_loss
    if bound is None:
        return Check("final_loss", PASS, f"{value:.6g}, no bound is set", value)
    bad = value > bound if inputs.goal == "down" else value < bound
    wanted = "at most" if inputs.goal == "down" else "at least"
    message = f"{value:.6g}, {wanted} {bound:g} is wanted"
    return Check("final_loss", FAIL if bad else PASS, message, value, bound)


def _progress(seen: Shape, curve: CurveStatistics, inputs: LossInputs, sign: float) -> Check:
    """Whether the curve moves in the right direction, by its trend or by its two ends."""
    name, bound = "progress", inputs.trend_sigmas
    way = f"from {sign * seen.start:.4g} to {sign * seen.end:.4g}"
    rise, of_noise = seen.end - seen.start, math.sqrt(2) * seen.noise
    apart = rise / of_noise if of_noise > 0 else math.copysign(math.inf, rise) if rise else 0.0
    wrong, right = ("rises", "falls") if inputs.goal == "down" else ("falls", "rises")
    if not curve.level.variance > 0:
        message = f"it never changes: {sign * seen.end:.4g} at every step"
        return Check(name, WARN, message, sign * seen.trend, bound)
    measured = (
        f"trend {sign * seen.trend:+.1f} sigma, end against start {sign * apart:+.1f} sigma; "
        f"either counts from {bound:g} on"
    )
    if rise and max(seen.trend * math.copysign(1, rise), abs(apart)) > bound:
        # The number that decides.
        by_trend = seen.trend * math.copysign(1, rise) > bound
        value = sign * (seen.trend if by_trend else apart)
        verdict, goes = (FAIL, wrong) if rise > 0 else (PASS, right)
        return Check(name, verdict, f"it {goes}, {way} ({measured})", value, bound)
    if seen.drop > bound:
        message = (
            f"it {right} within its first values, the first is {seen.drop:.1f} sigma away, and "
            f"holds {sign * seen.end:.4g}"
        )
        return Check(name, PASS, message, seen.drop, bound)
    value = sign * max(seen.trend, apart, key=abs)
    if abs(seen.trend) > bound:  # opposite to its ends
        message = f"{way}, and a trend the other way ({measured})"
    else:
        message = f"{way}: no more than its noise ({measured})"
    if curve.signed:
        # The loss of a policy gradient is about 0 by construction.
        return Check(name, PASS, f"{message}; it takes both signs, so it need not", value, bound)
    return Check(name, WARN, f"{message}: nothing is learnt", value, bound)


def _convergence_ratio(seen: Shape, curve: CurveStatistics, inputs: LossInputs) -> Check:
    name, bound = "convergence_ratio", inputs.max_convergence_ratio
    if inputs.goal == "up" or curve.best <= 0 or seen.start <= 0:
        message = "only losses above 0 that should fall have one"
        return Check(name, SKIP, message, None, bound, decides=False)
    value = seen.end / seen.start
    noise = math.sqrt(2) * inputs.trend_sigmas * seen.noise / seen.start if bound >= 1 else 0.0
    verdict = WARN if value > bound + noise else PASS
    message = f"the end is {value:.4g} of the start, at most {bound:g} is wanted"
    return Check(name, verdict, message, value, bound)


def _regret(seen: Shape, inputs: LossInputs, sign: float) -> Check:
    name, bound = "regret", [inputs.warn_regret, inputs.fail_regret]
    lost = seen.relative_regret
    if lost is None:
        message = "it was never better than at its start"
        return Check(name, SKIP, message, None, bound, decides=False)
    # The lowest of many medians is below the curve by noise alone: twice the usual bound.
    if seen.regret <= 2 * inputs.trend_sigmas * seen.noise:
        message = f"it ends at its best, {sign * seen.best:.4g}, up to its noise"
        return Check(name, PASS, message, lost, bound)
    verdict = FAIL if lost > bound[1] else WARN if lost > bound[0] else PASS
    message = (
        f"at the end {lost:.1%} of the way to its best ({sign * seen.best:.4g}) is lost again; "
        f"WARN above {bound[0]:.0%}, FAIL above {bound[1]:.0%}"
    )
    return Check(name, verdict, message, lost, bound)


def _smoothness(curve: CurveStatistics, inputs: LossInputs) -> Check:
    name, bound, value = "smoothness", inputs.min_smoothness, curve.smoothness
    if value is None:
        message = "a curve that does not change has none"
        return Check(name, SKIP, message, None, bound, decides=False)
    message = f"{value:.3f}, at least {bound:g} is wanted (noise around a level has -1)"
    # Its standard deviation for pure noise is 2 / sqrt(n): too large with few values.
    many = curve.finite >= _SMOOTHNESS_NEEDS
    return Check(name, WARN if value < bound else PASS, message, value, bound, decides=many)


def _events(found: Events, inputs: LossInputs) -> Check:
    name, bound = "instability_events", inputs.max_events
    jumps = f"{found.jumps} single high value{'s' * (found.jumps != 1)} besides"
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
