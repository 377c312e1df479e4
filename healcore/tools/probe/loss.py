"""The loss probe: checks that a curve is the curve of a healthy run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.history.curves import thin
from healcore.tools.probe.inputs import LOSS_CHECKS, LossInputs
from healcore.tools.probe.loss_curve import Curve, Shape, block_medians, measure_shape
from healcore.tools.probe.loss_events import Events, find_events
from healcore.tools.probe.result import FAIL, PASS, SKIP, WARN, Check, NothingToProbe, ProbeResult
from healcore.tools.traces import Trace, lineage

_CURVE_POINTS = 512
_MAX_KEPT = 1000
_MIN_VALUES_FOR_SMOOTHNESS = 30
_LASTING_NORMS, _MIN_EVALUATIONS = 3, 4
_RARE_NORMS = 0.05
"""Fraction of the norms that a loss scale may make infinite in a healthy run."""
_NEAR_ZERO = 0.05
"""Fraction of the first loss from which a loss may reach exactly 0 by rounding or a margin."""
_FATAL = ("finite", "gradient_norm", "zero_loss")
"""Checks whose FAIL gives the score 0."""
_CLOSENESS = {PASS: 1.0, WARN: 0.5, FAIL: 0.0}


class Columns(NamedTuple):
    """The columns of the final run, without rows that a resume replaced."""

    loss: Curve
    norms: Curve
    evaluations: Curve
    nonzero: Curve
    """Losses, with NaN for a loss of exactly 0 without a gradient norm above 0."""


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> ProbeResult:
    """Probes the curve of a run. Ignores rows that a resume replaced.

    Raises NothingToProbe if the trace does not log a loss.
    """
    inputs = inputs or LossInputs()
    columns = _columns(trace)
    curve = columns.loss
    if not len(curve.value):
        raise NothingToProbe(f"{trace.name} logs no loss: pass --column loss=NAME")
    events = find_events(curve.steps, curve.finite, inputs.event_sigmas, inputs.rolling_window)
    kept = thin(np.arange(len(curve.value)), {"value": curve.value}, _CURVE_POINTS)
    facts: dict[str, Any] = {
        "values": len(curve.value),
        "first_step": float(curve.step[0]),
        "last_step": float(curve.step[-1]),
        "best": float(curve.finite.min()) if len(curve.finite) else None,
        "nonfinite": curve.nonfinite,
        "events": events.events[:_MAX_KEPT],
        "jumps": events.jumps,
        "curve": {"step": curve.step[kept], "value": curve.value[kept]},
    }
    checks = _checks(columns, events, inputs, facts)
    facts["score"] = score(checks, inputs)
    return ProbeResult("loss", trace.name, tuple(checks), facts, tuple(_notes(trace)))


def _columns(trace: Trace) -> Columns:
    rows = lineage(trace)
    absent = np.full(len(rows.step), np.nan)
    none = np.zeros(len(rows.step), bool)

    def values(name: str) -> np.ndarray:
        return rows.values.get(name, absent).astype(np.float64)

    def curve(name: str, values: np.ndarray) -> Curve:
        logged = rows.logged.get(name, none)
        return Curve(rows.step[logged], values[logged])

    loss, norm = values("loss"), values("grad_norm")
    untrained = (loss == 0) & ~((norm > 0) & (norm < np.inf))
    return Columns(
        curve("loss", loss),
        curve("grad_norm", norm),
        curve("eval_loss", values("eval_loss")),
        curve("loss", np.where(untrained, np.nan, loss)),
    )


def score(checks: Sequence[Check], inputs: LossInputs) -> float | None:
    """Returns the score of a curve from 0 to 1, or None if the curve is too short.

    The score is the weighted mean over the checks that count: 1 for PASS, 0.5 for WARN, 0 for FAIL.
    A run that ends without training has 0.
    """
    counted = [check for check in checks if check.decides and check.name in LOSS_CHECKS]
    if any(check.name in _FATAL and check.verdict is FAIL for check in counted):
        return 0.0
    if any(check.name == "length" for check in checks):
        return None
    given: dict[Any, float] = {**inputs.weights}
    weights = [given.get(check.name, 1.0) for check in counted]
    closeness = [_CLOSENESS[check.verdict] for check in counted]
    return float(np.average(closeness, weights=weights)) if sum(weights) > 0 else None


def _notes(trace: Trace) -> list[str]:
    notes = list(trace.problems[:100])
    if len(trace.problems) > len(notes):
        notes.append(f"{len(trace.problems) - len(notes)} further problems in this trace")
    if trace.stale:
        notes.append(f"{trace.stale} rows were repeated by a resume; the last value counts")
    return notes


def _checks(
    columns: Columns, events: Events, inputs: LossInputs, facts: dict[str, Any]
) -> list[Check]:
    curve, evaluations = columns.loss, columns.evaluations
    first = [_finite(curve, inputs)]
    if len(columns.norms.value):
        first.append(_gradient_norm(columns.norms))
    number = len(curve.finite)
    if number < inputs.min_steps:
        message = (
            f"{number} finite value{'s' * (number != 1)}; a verdict needs at least "
            f"{inputs.min_steps}"
        )
        return [*first, Check("length", SKIP, message, number, inputs.min_steps)]
    shape = measure_shape(block_medians(curve.finite))
    facts |= {"start": shape.start, "end": shape.end}
    if curve.finite[-1] == 0:
        first.append(_zero_loss(columns.nonzero, shape, inputs))
    if evaluations.trailing or len(evaluations.finite) >= _MIN_EVALUATIONS:
        first.append(_eval_loss(evaluations, shape, inputs))
    return [
        *first,
        _final_loss(shape, inputs),
        _progress(shape, curve, inputs),
        _convergence_ratio(shape, curve, inputs),
        _regret(shape, inputs),
        _smoothness(curve, inputs),
        _events(events, inputs),
    ]


def _finite(curve: Curve, inputs: LossInputs) -> Check:
    """Counts NaN and Inf: FAIL at the end of the curve, WARN if the run recovered."""
    bad, total = curve.nonfinite, len(curve.value)
    name, bound = "finite", inputs.max_nonfinite
    if curve.trailing:
        last = "value is" if curve.trailing == 1 else f"{curve.trailing} values are"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {total} in all)"
        return Check(name, FAIL, message, bad, bound)
    if bad > bound:
        first = curve.step[~np.isfinite(curve.value)][0]
        message = f"{bad} of {total} values are NaN or Inf, first at step {first:.15g}"
        return Check(name, WARN, message, bad, bound)
    message = f"{bad} of {total} values are NaN or Inf" if bad else f"all {total} values are finite"
    return Check(name, PASS, message, bad, bound)


def _gradient_norm(norms: Curve) -> Check:
    """Counts norms that are NaN or Inf: FAIL for several at the end, WARN if they are not rare."""
    bad, total, last = norms.nonfinite, len(norms.value), norms.trailing
    verdict = FAIL if last >= _LASTING_NORMS else WARN if bad > _RARE_NORMS * total else PASS
    message = f"{bad} of {total} are NaN or Inf; at the end, {last} in a row"
    return Check("gradient_norm", verdict, message, bad, _RARE_NORMS)


def _zero_loss(nonzero: Curve, shape: Shape, inputs: LossInputs) -> Check:
    """Fails a loss that falls to exactly 0 at once and stays there."""
    sudden = len(nonzero.finite) > 0 and nonzero.finite[-1] > _NEAR_ZERO * shape.start
    verdict = FAIL if sudden and nonzero.trailing >= inputs.min_steps else PASS
    message = f"the last {nonzero.trailing} losses are exactly 0 or not finite, without a gradient"
    return Check("zero_loss", verdict, message, nonzero.trailing, inputs.min_steps)


def _eval_loss(evaluations: Curve, training: Shape, inputs: LossInputs) -> Check:
    """Judges a rise of the evaluation loss while the training loss falls, as `_regret`."""
    if evaluations.trailing:
        return _finite(evaluations, inputs)._replace(name="eval_loss")
    values = block_medians(evaluations.finite)
    shape = measure_shape(values)
    least = inputs.warn_regret * (training.start - training.end)
    rises = shape.regret > 2 * inputs.trend_sigmas * shape.noise or (np.diff(values[-4:]) > 0).all()
    if not rises or not shape.regret > least > 0:
        return Check("eval_loss", PASS, "it does not rise while the training loss falls")
    shape = shape._replace(start=max(shape.start, shape.best + least), noise=0.0)
    return _regret(shape, inputs)._replace(name="eval_loss")


def _final_loss(shape: Shape, inputs: LossInputs) -> Check:
    value, bound = shape.end, inputs.max_final_loss
    if bound is None:
        return Check("final_loss", PASS, f"{value:.6g}; no bound is set", value)
    message = f"{value:.6g}; should be at most {bound:g}"
    return Check("final_loss", FAIL if value > bound else PASS, message, value, bound)


def _progress(shape: Shape, curve: Curve, inputs: LossInputs) -> Check:
    """Checks that the curve falls, by its trend or by its two ends."""
    name, bound = "progress", inputs.trend_sigmas
    span = f"from {shape.start:.4g} to {shape.end:.4g}"
    rise, sigma = shape.end - shape.start, math.sqrt(2) * shape.noise
    distance = rise / sigma if sigma > 0 else math.copysign(math.inf, rise) if rise else 0.0
    if not curve.variance > 0:
        message = f"the curve is constant: {shape.end:.4g} at every step"
        return Check(name, WARN, message, shape.trend, bound)
    measured = (
        f"trend {shape.trend:+.1f} sigma, end against start {distance:+.1f} sigma; "
        f"significant from {bound:g} sigma"
    )
    if rise and max(shape.trend * math.copysign(1, rise), abs(distance)) > bound:
        by_trend = shape.trend * math.copysign(1, rise) > bound
        verdict, verb = (FAIL, "rises") if rise > 0 else (PASS, "falls")
        value = shape.trend if by_trend else distance
        return Check(name, verdict, f"it {verb}, {span} ({measured})", value, bound)
    if shape.drop > bound:
        message = (
            f"it falls within its first values, by {shape.drop:.1f} sigma, and stays at "
            f"{shape.end:.4g}"
        )
        return Check(name, PASS, message, shape.drop, bound)
    value = max(shape.trend, distance, key=abs)
    if abs(shape.trend) > bound:
        message = f"{span}, but the trend has the opposite direction ({measured})"
    else:
        message = f"{span}: the change is within the noise ({measured})"
    if curve.finite.min() <= 0 <= curve.finite.max():
        # The loss of a policy gradient is about 0 by construction.
        message += "; a curve with both signs need not progress"
        return Check(name, PASS, message, value, bound)
    return Check(name, WARN, f"{message}: no progress", value, bound)


def _convergence_ratio(shape: Shape, curve: Curve, inputs: LossInputs) -> Check:
    name, bound = "convergence_ratio", inputs.max_convergence_ratio
    if curve.finite.min() <= 0 or shape.start <= 0:
        message = "only defined for losses above 0"
        return Check(name, SKIP, message, None, bound, decides=False)
    value = shape.end / shape.start
    noise = math.sqrt(2) * inputs.trend_sigmas * shape.noise / shape.start if bound >= 1 else 0.0
    verdict = WARN if value > bound + noise else PASS
    message = f"the end is {value:.4g} of the start; should be at most {bound:g}"
    return Check(name, verdict, message, value, bound)


def _regret(shape: Shape, inputs: LossInputs) -> Check:
    name, bound = "regret", [inputs.warn_regret, inputs.fail_regret]
    lost = shape.relative_regret
    if lost is None:
        message = "the curve was never better than at its start"
        return Check(name, SKIP, message, None, bound, decides=False)
    # The bound is doubled, because noise alone puts the lowest of many medians below the curve.
    if shape.regret <= 2 * inputs.trend_sigmas * shape.noise:
        message = f"the curve ends at its best, {shape.best:.4g}, within the noise"
        return Check(name, PASS, message, lost, bound)
    verdict = FAIL if lost > bound[1] else WARN if lost > bound[0] else PASS
    message = (
        f"at the end, {lost:.1%} of the progress to the best ({shape.best:.4g}) is lost; "
        f"WARN above {bound[0]:.0%}, FAIL above {bound[1]:.0%}"
    )
    return Check(name, verdict, message, lost, bound)


def _smoothness(curve: Curve, inputs: LossInputs) -> Check:
    name, bound, value = "smoothness", inputs.min_smoothness, curve.smoothness
    if value is None:
        message = "not defined for a constant curve"
        return Check(name, SKIP, message, None, bound, decides=False)
    message = f"{value:.3f}; should be at least {bound:g} (noise around a level has -1)"
    # For pure noise, its standard deviation is 2 / sqrt(n), which is too large for small n.
    reliable = len(curve.finite) >= _MIN_VALUES_FOR_SMOOTHNESS
    return Check(name, WARN if value < bound else PASS, message, value, bound, decides=reliable)


def _events(found: Events, inputs: LossInputs) -> Check:
    name, bound = "instability_events", inputs.max_events
    count = len(found.events)
    jumps = f"{found.jumps} single high value{'s' * (found.jumps != 1)}"
    if not count:
        return Check(name, PASS, f"none ({jumps})", 0, bound)
    first = found.events[0]
    message = (
        f"{count} event{'s' * (count != 1)} far above the level before, the first at step "
        f"{first.step:.15g} for {first.values} values ({jumps})"
    )
    if found.unfinished is not None:
        message += f"; the curve ends in the event of step {found.unfinished.step:.15g}"
        return Check(name, FAIL, message, count, bound)
    return Check(name, WARN if count > bound else PASS, message, count, bound)
