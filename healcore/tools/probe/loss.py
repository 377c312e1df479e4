"""The loss probe: checks that a curve is the curve of a healthy run."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from healcore.history.curves import Envelope
from healcore.tools.probe.inputs import LOSS_CHECKS, LossInputs
from healcore.tools.probe.loss_curve import (
    CurveStatistics,
    OtherColumns,
    Shape,
    logged,
    measure_shape,
)
from healcore.tools.probe.loss_events import DetectorEventFinder, WindowEventFinder
from healcore.tools.probe.result import FAIL, PASS, SKIP, WARN, Check, NothingToProbe, ProbeResult
from healcore.tools.traces import Trace, lineage

_MIN_VALUES_FOR_SMOOTHNESS = 30
_LOWEST_SMOOTHNESS = -3.0
"""Smoothness of a curve that alternates between two values."""
_LASTING_NORMS, _MIN_EVALUATIONS = 3, 4
_RARE_NORMS = 0.05
"""Fraction of the norms that a loss scale may make infinite in a healthy run."""
_NEAR_ZERO = 0.05
"""Fraction of the first loss from which a loss may reach exactly 0 by rounding or a margin."""
_FATAL = ("finite", "gradient_norm", "zero_loss")
"""Checks whose FAIL gives the score 0."""


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> ProbeResult:
    """Probes the curve of a run. Ignores rows that a resume replaced.

    Raises NothingToProbe if the trace does not log the signal.
    """
    inputs = inputs or LossInputs()
    if inputs.signal not in trace.signals:
        logged_names = ", ".join(sorted(trace.signals)) or "no known signal"
        raise NothingToProbe(
            f"{trace.name} logs no {inputs.signal}, only {logged_names}: pass --signal for another "
            f"signal, or --column {inputs.signal}=NAME for a column with another name"
        )
    # The checks assume that lower is better. Messages and facts show the numbers as logged.
    sign = 1.0 if inputs.goal == "down" else -1.0
    curve = CurveStatistics()
    finder = WindowEventFinder(inputs.event_sigmas, inputs.event_points, inputs.rolling_window)
    # The detector reports many events in healthy norms, so only losses are passed to it.
    is_loss = inputs.signal in ("loss", "eval_loss")
    detector = DetectorEventFinder(inputs.event_sigmas, inputs.event_points) if is_loss else None
    thinned = Envelope(inputs.curve_points)
    others = OtherColumns()
    rows = lineage(trace)
    others.add(rows)
    chunk = logged(rows, inputs.signal)
    by_step = bool((chunk.step == np.rint(chunk.step)).all())
    places = np.rint(chunk.step).astype(np.int64) if by_step else chunk.index
    thinned.add(places, {"value": chunk.value})
    values = curve.add(chunk.step, sign * chunk.value)
    steps = chunk.step[np.isfinite(chunk.value)]
    finder.add(steps, values)
    if detector is not None:
        detector.add(steps, values)
    finder.finish()
    if detector is not None:
        finder.include(detector.finish())
    places, columns = thinned.thinned()
    facts: dict[str, Any] = {
        "values": curve.values,
        "first_step": curve.first_step,
        "last_step": curve.last_step,
        "last": sign * curve.last if curve.finite else None,
        "best": sign * curve.best if curve.finite else None,
        "nonfinite": curve.nonfinite,
        "events": finder.events,
        "jumps": finder.jumps,
        "curve": {
            "step" if by_step else "row": places,
            "value": columns.get("value", np.empty(0)),
        },
    }
    checks = _checks(curve, finder, others, inputs, sign, facts)
    facts["score"] = score(checks, inputs)
    return ProbeResult("loss", trace.name, tuple(checks), facts, tuple(_notes(trace)))


def score(checks: Sequence[Check], inputs: LossInputs) -> float | None:
    """Returns the score of a curve from 0 to 1, or None if the curve is too short.

    The score is the weighted mean over the checks that count: 1 for PASS, 0 for FAIL, and for WARN
    a number that decreases with the distance to the bound. A run that ends without training has 0.
    """
    counted = [check for check in checks if check.decides and check.name in LOSS_CHECKS]
    if any(check.name in _FATAL and check.verdict is FAIL for check in counted):
        return 0.0
    weights = [inputs.weights.get(check.name, 1.0) for check in counted]
    if len(counted) < len(checks) and any(check.name == "length" for check in checks):
        return None
    total = sum(weights)
    weighted = sum(map(operator.mul, weights, map(_closeness, counted)))
    return weighted / total if total > 0 else None


def _closeness(check: Check) -> float:
    """Returns 1 for PASS, 0 for FAIL, and for WARN a number that falls with the distance."""
    if check.verdict is not WARN:
        return float(check.verdict is PASS)
    value, bound = check.value, check.bound
    if check.name == "convergence_ratio":
        return bound / value
    if check.name == "smoothness":
        return max(0.0, (value - _LOWEST_SMOOTHNESS) / (bound - _LOWEST_SMOOTHNESS))
    if check.name == "regret":
        return (bound[1] - value) / (bound[1] - bound[0])
    if check.name in ("finite", "instability_events"):
        return (1 + bound) / (1 + value)
    return 0.5  # the other bounds are no distance


def _notes(trace: Trace) -> list[str]:
    notes = list(trace.problems)
    if trace.problem_count > len(notes):
        notes.append(f"{trace.problem_count - len(notes)} further problems in this trace")
    if trace.stale:
        notes.append(f"{trace.stale} rows were repeated by a resume; the last value counts")
    return notes


def _checks(
    curve: CurveStatistics,
    events: WindowEventFinder,
    others: OtherColumns,
    inputs: LossInputs,
    sign: float,
    facts: dict[str, Any],
) -> list[Check]:
    first = [_finite(curve, inputs)]
    if inputs.signal != "grad_norm" and others.norms.values:
        first.append(_gradient_norm(others.norms))
    if curve.finite < inputs.min_steps:
        message = (
            f"{curve.finite} finite value{'s' * (curve.finite != 1)}; a verdict needs at least "
            f"{inputs.min_steps}"
        )
        return [*first, Check("length", SKIP, message, curve.finite, inputs.min_steps)]
    shape = measure_shape(curve.blocks.medians(), inputs.ends)
    facts |= {
        "start": sign * shape.start,
        "end": sign * shape.end,
        "best_so_far": sign * shape.best,
        "regret": shape.regret,
        "noise": shape.noise,
    }
    if inputs.signal == "loss" and inputs.goal == "down":
        if curve.last == 0:
            first.append(_zero_loss(others.nonzero, shape, inputs))
        if others.evaluations.trailing or others.evaluations.finite >= _MIN_EVALUATIONS:
            first.append(_eval_loss(others.evaluations, shape, inputs))
    return [
        *first,
        _final_loss(shape, inputs, sign),
        _progress(shape, curve, inputs, sign),
        _convergence_ratio(shape, curve, inputs),
        _regret(shape, inputs, sign),
        _smoothness(curve, inputs),
        _events(events, inputs),
    ]


def _finite(curve: CurveStatistics, inputs: LossInputs) -> Check:
    """Counts NaN and Inf: FAIL at the end of the curve, WARN if the run recovered."""
    bad, total = curve.nonfinite, curve.values
    name, bound = "finite", inputs.max_nonfinite
    if curve.trailing:
        last = "value is" if curve.trailing == 1 else f"{curve.trailing} values are"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {total} in all)"
        return Check(name, FAIL, message, bad, bound)
    if bad > bound:
        message = (
            f"{bad} of {total} values are NaN or Inf, first at step {curve.first_nonfinite:.15g}"
        )
        return Check(name, WARN, message, bad, bound)
    message = f"{bad} of {total} values are NaN or Inf" if bad else f"all {total} values are finite"
    return Check(name, PASS, message, bad, bound)


def _gradient_norm(norms: CurveStatistics) -> Check:
    """Counts norms that are NaN or Inf: FAIL for several at the end, WARN if they are not rare."""
    bad, total, last = norms.nonfinite, norms.values, norms.trailing
    verdict = FAIL if last >= _LASTING_NORMS else WARN if bad > _RARE_NORMS * total else PASS
    message = f"{bad} of {total} are NaN or Inf; at the end, {last} in a row"
    return Check("gradient_norm", verdict, message, bad, _RARE_NORMS)


def _zero_loss(nonzero: CurveStatistics, shape: Shape, inputs: LossInputs) -> Check:
    """Fails a loss that falls to exactly 0 at once and stays there."""
    sudden = nonzero.last > _NEAR_ZERO * shape.start
    verdict = FAIL if sudden and nonzero.trailing >= inputs.min_steps else PASS
    message = f"the last {nonzero.trailing} losses are exactly 0 or not finite, without a gradient"
    return Check("zero_loss", verdict, message, nonzero.trailing, inputs.min_steps)


def _eval_loss(evaluations: CurveStatistics, training: Shape, inputs: LossInputs) -> Check:
    """Judges a rise of the evaluation loss while the training loss falls, as `_regret`."""
    if evaluations.trailing:
        return _finite(evaluations, inputs)._replace(name="eval_loss")
    values = evaluations.blocks.medians()
    shape = measure_shape(values, inputs.ends)
    least = inputs.warn_regret * (training.start - training.end)
    rises = shape.regret > 2 * inputs.trend_sigmas * shape.noise or (np.diff(values[-4:]) > 0).all()
    if not rises or not shape.regret > least > 0:
        return Check("eval_loss", PASS, "it does not rise while the training loss falls")
    shape = shape._replace(start=max(shape.start, shape.best + least), noise=0.0)
    return _regret(shape, inputs, 1.0)._replace(name="eval_loss")


def _final_loss(shape: Shape, inputs: LossInputs, sign: float) -> Check:
    value, bound = sign * shape.end, inputs.max_final_loss
    if bound is None:
        return Check("final_loss", PASS, f"{value:.6g}; no bound is set", value)
    bad = value > bound if inputs.goal == "down" else value < bound
    limit = "at most" if inputs.goal == "down" else "at least"
    message = f"{value:.6g}; should be {limit} {bound:g}"
    return Check("final_loss", FAIL if bad else PASS, message, value, bound)


def _progress(shape: Shape, curve: CurveStatistics, inputs: LossInputs, sign: float) -> Check:
    """Checks that the curve moves in the right direction, by its trend or by its two ends."""
    name, bound = "progress", inputs.trend_sigmas
    span = f"from {sign * shape.start:.4g} to {sign * shape.end:.4g}"
    rise, sigma = shape.end - shape.start, math.sqrt(2) * shape.noise
    distance = rise / sigma if sigma > 0 else math.copysign(math.inf, rise) if rise else 0.0
    wrong, right = ("rises", "falls") if inputs.goal == "down" else ("falls", "rises")
    if not curve.level.variance > 0:
        message = f"the curve is constant: {sign * shape.end:.4g} at every step"
        return Check(name, WARN, message, sign * shape.trend, bound)
    measured = (
        f"trend {sign * shape.trend:+.1f} sigma, end against start {sign * distance:+.1f} sigma; "
        f"significant from {bound:g} sigma"
    )
    if rise and max(shape.trend * math.copysign(1, rise), abs(distance)) > bound:
        by_trend = shape.trend * math.copysign(1, rise) > bound
        value = sign * (shape.trend if by_trend else distance)
        verdict, verb = (FAIL, wrong) if rise > 0 else (PASS, right)
        return Check(name, verdict, f"it {verb}, {span} ({measured})", value, bound)
    if shape.drop > bound:
        message = (
            f"it {right} within its first values, by {shape.drop:.1f} sigma, and stays at "
            f"{sign * shape.end:.4g}"
        )
        return Check(name, PASS, message, shape.drop, bound)
    value = sign * max(shape.trend, distance, key=abs)
    if abs(shape.trend) > bound:
        message = f"{span}, but the trend has the opposite direction ({measured})"
    else:
        message = f"{span}: the change is within the noise ({measured})"
    if curve.signed:
        # The loss of a policy gradient is about 0 by construction.
        message += "; a curve with both signs need not progress"
        return Check(name, PASS, message, value, bound)
    return Check(name, WARN, f"{message}: no progress", value, bound)


def _convergence_ratio(shape: Shape, curve: CurveStatistics, inputs: LossInputs) -> Check:
    name, bound = "convergence_ratio", inputs.max_convergence_ratio
    if inputs.goal == "up" or curve.best <= 0 or shape.start <= 0:
        message = "only defined for losses above 0 that should fall"
        return Check(name, SKIP, message, None, bound, decides=False)
    value = shape.end / shape.start
    noise = math.sqrt(2) * inputs.trend_sigmas * shape.noise / shape.start if bound >= 1 else 0.0
    verdict = WARN if value > bound + noise else PASS
    message = f"the end is {value:.4g} of the start; should be at most {bound:g}"
    return Check(name, verdict, message, value, bound)


def _regret(shape: Shape, inputs: LossInputs, sign: float) -> Check:
    name, bound = "regret", [inputs.warn_regret, inputs.fail_regret]
    lost = shape.relative_regret
    if lost is None:
        message = "the curve was never better than at its start"
        return Check(name, SKIP, message, None, bound, decides=False)
    # The bound is doubled, because noise alone puts the lowest of many medians below the curve.
    if shape.regret <= 2 * inputs.trend_sigmas * shape.noise:
        message = f"the curve ends at its best, {sign * shape.best:.4g}, within the noise"
        return Check(name, PASS, message, lost, bound)
    verdict = FAIL if lost > bound[1] else WARN if lost > bound[0] else PASS
    message = (
        f"at the end, {lost:.1%} of the progress to the best ({sign * shape.best:.4g}) is lost; "
        f"WARN above {bound[0]:.0%}, FAIL above {bound[1]:.0%}"
    )
    return Check(name, verdict, message, lost, bound)


def _smoothness(curve: CurveStatistics, inputs: LossInputs) -> Check:
    name, bound, value = "smoothness", inputs.min_smoothness, curve.smoothness
    if value is None:
        message = "not defined for a constant curve"
        return Check(name, SKIP, message, None, bound, decides=False)
    message = f"{value:.3f}; should be at least {bound:g} (noise around a level has -1)"
    # For pure noise, its standard deviation is 2 / sqrt(n), which is too large for small n.
    reliable = curve.finite >= _MIN_VALUES_FOR_SMOOTHNESS
    return Check(name, WARN if value < bound else PASS, message, value, bound, decides=reliable)


def _events(finder: WindowEventFinder, inputs: LossInputs) -> Check:
    name, bound = "instability_events", inputs.max_events
    count = finder.count
    jumps = f"{finder.jumps} single high value{'s' * (finder.jumps != 1)}"
    if not count:
        return Check(name, PASS, f"none ({jumps})", 0, bound)
    first = finder.events[0]
    message = (
        f"{count} event{'s' * (count != 1)} far above the level before, the first at step "
        f"{first.step:.15g} for {first.values} values ({jumps})"
    )
    if finder.unfinished is not None:
        message += f"; the curve ends in the event of step {finder.unfinished.step:.15g}"
        return Check(name, FAIL, message, count, bound)
    return Check(name, WARN if count > bound else PASS, message, count, bound)
