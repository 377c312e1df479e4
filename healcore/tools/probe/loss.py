"""The loss probe: checks that a curve is the curve of a healthy run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from healcore.console import counted, first_lines
from healcore.history.curves import thin
from healcore.tools.probe.checks import (
    FAIL,
    PASS,
    SKIP,
    WARN,
    Check,
    LossInputs,
    NothingToProbe,
    ProbeResult,
    score,
    worst,
)
from healcore.tools.probe.loss_curve import Event, Shape, block_medians, find_events, measure_shape
from healcore.tools.traces import Trace, lineage

_CURVE_POINTS = 512
_MIN_VALUES_FOR_SMOOTHNESS = 30
"""Values from which the smoothness counts. For noise, its standard deviation is 2 / sqrt(n)."""
_LASTING_NORMS = 3
_RARE_NORMS = 0.05  # fraction of the norms that a loss scale may make infinite in a healthy run
_NEAR_ZERO = 0.05
"""Fraction of the first loss from which a loss may reach exactly 0 by rounding or a margin."""
_FATAL = ("finite", "gradient_norm", "zero_loss")
"""Checks whose FAIL gives the score 0, because the run ends without training."""


class Column(NamedTuple):
    """One logged column of a run, without rows that were repeated later; float64 (n,) both."""

    step: np.ndarray
    value: np.ndarray

    @property
    def finite(self) -> np.ndarray:
        """The finite values."""
        return self.value[np.isfinite(self.value)]

    @property
    def nonfinite_count(self) -> int:
        """Number of NaN and Inf."""
        return len(self.value) - len(self.finite)

    @property
    def trailing_count(self) -> int:
        """Number of consecutive NaN and Inf at the end."""
        finite = np.isfinite(self.value)
        return int(finite[::-1].argmax()) if finite.any() else len(finite)


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> ProbeResult:
    """Probes the curve of a run. Ignores rows that the run repeated later.

    Raises NothingToProbe if the trace does not log a loss.
    """
    inputs = inputs or LossInputs()
    rows = lineage(trace)

    def column(name: str) -> Column:
        logged = rows.logged.get(name, np.zeros(len(rows.step), bool))
        values = rows.values.get(name, rows.step)[logged]
        return Column(rows.step[logged], values.astype(np.float64))

    curve, norms = column("loss"), column("grad_norm")
    if not len(curve.value):
        raise NothingToProbe(f"{trace.name} logs no loss: pass --column loss=NAME")
    finite = curve.finite
    steps = curve.step[np.isfinite(curve.value)]
    sigmas = inputs.event_sigmas
    events, jumps, unfinished = find_events(steps, finite, sigmas, inputs.rolling_window)
    kept = thin(np.arange(len(curve.value)), {"value": curve.value}, _CURVE_POINTS)
    facts: dict[str, Any] = {
        "values": len(curve.value),
        "files": trace.files,
        "initial_loss": float(finite[0]) if len(finite) else None,
        "first_step": float(curve.step[0]),
        "last_step": float(curve.step[-1]),
        "best": float(finite.min()) if len(finite) else None,
        "nonfinite": curve.nonfinite_count,
        "events": events,
        "jumps": jumps,
        "curve": {"step": curve.step[kept].tolist(), "value": curve.value[kept].tolist()},
    }
    checks = [_finite(curve, inputs, trace.unit)]
    logs = np.flatnonzero(np.any([*rows.logged.values()], axis=0))
    *gaps, last = (np.diff(logs, append=len(rows.step)) - 1).tolist()
    if last >= inputs.min_steps and last > 2 * max(gaps, default=0):
        # pandas and some writers of JSON write NaN as an empty cell or null.
        message = f"{checks[0].message}; the last {last} rows are empty, which may be NaN"
        checks[0] = checks[0]._replace(verdict=worst([checks[0].verdict, WARN]), message=message)
    if len(norms.value):
        checks.append(_gradient_norm(norms))
    if len(finite) < inputs.min_steps:
        number, least = len(finite), inputs.min_steps
        message = f"{counted(number, 'finite value')}; a verdict needs at least {least}"
        checks.append(Check("length", SKIP, message, number, least))
    else:
        shape = measure_shape(block_medians(finite))
        facts |= {"start": shape.start, "end": shape.end}
        if finite[-1] == 0:
            trained = norms.step[(norms.value > 0) & (norms.value < np.inf)]
            checks.append(_zero_loss(curve, trained, shape, inputs))
        checks += [
            _final_loss(shape, inputs),
            _progress(shape, finite, inputs),
            _convergence_ratio(shape, finite, inputs),
            _regret(shape, inputs),
            _smoothness(curve, inputs),
            _events(events, jumps, unfinished, inputs, trace.unit),
        ]
    facts["score"] = score(checks, _FATAL, {**inputs.weights})
    notes = first_lines(trace.problems, 100)
    if repeated := np.count_nonzero(trace.replaced):
        notes.append(f"{repeated} rows were repeated after a resume or a rollback; the last counts")
    return ProbeResult("loss", trace.name, tuple(checks), facts, tuple(notes))


def _finite(column: Column, inputs: LossInputs, unit: str) -> Check:
    """Counts NaN and Inf: FAIL at the end of the curve, WARN if the run recovered."""
    bad, total, trailing = column.nonfinite_count, len(column.value), column.trailing_count
    verdict = FAIL if trailing else WARN if bad > inputs.max_nonfinite else PASS
    message = f"{bad} of {total} values are NaN or Inf" if bad else f"all {total} values are finite"
    if trailing:
        last = "value is" if trailing == 1 else f"{trailing} values are"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {total} in all)"
    elif verdict is WARN:
        message += f", first at {unit} {column.step[~np.isfinite(column.value)][0]:.15g}"
    return Check("finite", verdict, message, bad, inputs.max_nonfinite)


def _gradient_norm(norms: Column) -> Check:
    """Counts norms that are NaN or Inf: FAIL for several at the end, WARN if they are not rare."""
    bad, total, last = norms.nonfinite_count, len(norms.value), norms.trailing_count
    verdict = FAIL if last >= _LASTING_NORMS else WARN if bad > _RARE_NORMS * total else PASS
    message = f"{bad} of {total} are NaN or Inf; at the end, {last} in a row"
    return Check("gradient_norm", verdict, message, bad, _RARE_NORMS)


def _zero_loss(curve: Column, trained: np.ndarray, shape: Shape, inputs: LossInputs) -> Check:
    """Fails a loss that falls to exactly 0 at once and stays there, except at `trained` steps."""
    untrained = (curve.value == 0) & ~np.isin(curve.step, trained)
    nonzero = Column(curve.step, np.where(untrained, np.nan, curve.value))
    sudden = len(nonzero.finite) > 0 and nonzero.finite[-1] > _NEAR_ZERO * shape.start
    count = nonzero.trailing_count
    verdict = FAIL if sudden and count >= inputs.min_steps else PASS
    message = f"the last {count} losses are exactly 0 or not finite, without a gradient"
    return Check("zero_loss", verdict, message, count, inputs.min_steps)


def _final_loss(shape: Shape, inputs: LossInputs) -> Check:
    value, bound = shape.end, inputs.max_final_loss
    rule = "no bound is set" if bound is None else f"should be at most {bound:g}"
    verdict = FAIL if bound is not None and value > bound else PASS
    return Check("final_loss", verdict, f"{value:.6g}; {rule}", value, bound)


def _progress(shape: Shape, finite: np.ndarray, inputs: LossInputs) -> Check:
    """Checks that the curve falls, by its trend or by its two ends."""
    bound = inputs.trend_sigmas
    trend = shape.trend
    end = f"{shape.end:.4g}"
    if not _variance(finite) > 0:
        message = f"the curve is constant: {end} at every step"
        return Check("progress", WARN, message, trend, bound)
    rise, sigma = shape.end - shape.start, math.sqrt(2) * shape.noise
    sign = math.copysign(1, rise)
    distance = rise / sigma if sigma > 0 else sign * math.inf if rise else 0.0
    span = f"from {shape.start:.4g} to {end}"
    measured = f"trend {trend:+.1f} sigma, end against start {distance:+.1f} sigma"
    measured += f"; significant from {bound:g} sigma"
    if rise and max(trend * sign, abs(distance)) > bound:
        verdict, verb = (FAIL, "rises") if rise > 0 else (PASS, "falls")
        value = trend if trend * sign > bound else distance
        return Check("progress", verdict, f"it {verb}, {span} ({measured})", value, bound)
    if shape.drop > bound:
        message = f"it falls within its first values, by {shape.drop:.1f} sigma, and stays at {end}"
        return Check("progress", PASS, message, shape.drop, bound)
    value = max(trend, distance, key=abs)
    opposite = ", but the trend has the opposite direction"
    within = opposite if abs(trend) > bound else ": the change is within the noise"
    message = f"{span}{within} ({measured})"
    if finite.min() <= 0 <= finite.max():
        # The loss of a policy gradient is about 0 by construction.
        message += "; a curve with both signs need not progress"
        return Check("progress", PASS, message, value, bound)
    return Check("progress", WARN, f"{message}: no progress", value, bound)


def _convergence_ratio(shape: Shape, finite: np.ndarray, inputs: LossInputs) -> Check:
    name, bound = "convergence_ratio", inputs.max_convergence_ratio
    if finite.min() <= 0 or shape.start <= 0:
        return Check(name, SKIP, "only defined for losses above 0", None, bound, decides=False)
    value = shape.end / shape.start
    noise = math.sqrt(2) * inputs.trend_sigmas * shape.noise / shape.start if bound >= 1 else 0.0
    message = f"the end is {value:.4g} of the start; should be at most {bound:g}"
    return Check(name, WARN if value > bound + noise else PASS, message, value, bound)


def _regret(shape: Shape, inputs: LossInputs) -> Check:
    """Judges the share of the progress to the best value that is lost at the end."""
    warn, fail = bound = [inputs.warn_regret, inputs.fail_regret]
    if not shape.start > shape.best:
        message = "the curve was never better than at its start"
        return Check("regret", SKIP, message, None, bound, decides=False)
    lost = shape.regret / (shape.start - shape.best)
    best = f"{shape.best:.4g}"
    # The bound is doubled, because noise alone puts the lowest of many medians below the curve.
    if shape.regret <= 2 * inputs.trend_sigmas * shape.noise:
        message = f"the end, {shape.end:.4g}, differs from the best, {best}, by noise only"
        return Check("regret", PASS, message, lost, bound)
    message = f"at the end, {lost:.1%} of the progress to the best ({best}) is lost; "
    message += f"WARN above {warn:.0%}, FAIL above {fail:.0%}"
    verdict = FAIL if lost > fail else WARN if lost > warn else PASS
    return Check("regret", verdict, message, lost, bound)


def _smoothness(curve: Column, inputs: LossInputs) -> Check:
    """Compares 1 - var(dL) / var(L) of finite neighbours with its bound."""
    name, bound, finite = "smoothness", inputs.min_smoothness, curve.finite
    variance = _variance(finite)
    if not 0 < variance < math.inf:
        return Check(name, SKIP, "not defined for a constant curve", None, bound, decides=False)
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.diff(curve.value)
        changes = changes[np.isfinite(changes)]
        value = 1 - _variance(changes) / variance
    message = f"{value:.3f}; should be at least {bound:g} (noise around a level has -1)"
    reliable = len(finite) >= _MIN_VALUES_FOR_SMOOTHNESS
    return Check(name, WARN if value < bound else PASS, message, value, bound, decides=reliable)


def _variance(values: np.ndarray) -> float:
    with np.errstate(invalid="ignore", over="ignore"):
        return float(values.var()) if len(values) else 0.0


def _events(
    events: list[Event], jumps: int, unfinished: bool, inputs: LossInputs, unit: str
) -> Check:
    """Judges the number of instability events, and whether the curve ends in one."""
    count = len(events)
    bound = inputs.max_events
    message = "none"
    if events:
        message = (
            f"{counted(count, 'event')} far above the level before, the first at {unit} "
            f"{events[0].step:.15g} for {events[0].values} values"
        )
    message += f" ({counted(jumps, 'single high value')}"
    too_many = inputs.max_jumps is not None and jumps > inputs.max_jumps
    message += f"; should be at most {inputs.max_jumps})" if too_many else ")"
    verdict = WARN if count > bound or too_many else PASS
    if unfinished:
        message += f"; the curve ends in the event of {unit} {events[-1].step:.15g}"
        verdict = FAIL
    return Check("instability_events", verdict, message, count, bound)
