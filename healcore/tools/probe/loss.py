"""The loss probe: checks that a curve is the curve of a healthy run."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from healcore.console import counted, first_lines, first_of
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
from healcore.tools.probe.loss_curve import (
    InstabilityEvent,
    Shape,
    block_medians,
    find_events,
    measure_shape,
    values_to_learn,
)
from healcore.tools.traces import Trace, lineage
from healcore.tools.traces.names import JUDGED_SIGNALS
from healcore.tools.traces.trace import Rows, missing_signals

_CURVE_POINTS = 512
"""Number of values of a curve in the JSON document."""
_MIN_VALUES_FOR_SMOOTHNESS = 30
"""Values from which the smoothness counts. For noise, its standard deviation is 2 / sqrt(n)."""
_MAX_NAMED = 10
"""Limit of the instability events that a message names."""
_LASTING_NORMS = 3
"""Number of NaN and Inf at the end of the norms from which the run does not recover."""
_RARE_NORMS = 0.05
"""Fraction of the norms that a loss scale may make infinite in a healthy run."""
_NEAR_ZERO = 0.05
"""Fraction of the first loss from which a loss may reach exactly 0 by rounding or a margin."""
_FATAL = ("finite", "gradient_norm", "zero_loss")
"""Checks whose FAIL gives the score 0, because the run ends without training."""


class Column(NamedTuple):
    """One logged column of a run, without rows that were repeated later.

    A run that resumes or rolls back logs some steps twice. Only the last value of a step is part of
    the weights at the end of the run.
    """

    step: np.ndarray
    """Steps, float64 (n,)."""
    value: np.ndarray
    """Logged values, float64 (n,), which may be NaN or Inf."""

    @property
    def finite(self) -> np.ndarray:
        """The values that are finite, float64 (m,), in their order.

        `step` has all steps, so the steps of these values are `step[np.isfinite(value)]`.
        """
        return self.value[np.isfinite(self.value)]

    @property
    def nonfinite_count(self) -> int:
        """Number of NaN and Inf. A run that recovered from them may still be fine."""
        return len(self.value) - len(self.finite)

    @property
    def trailing_count(self) -> int:
        """Number of consecutive NaN and Inf at the end.

        Above 0 the run has diverged for good, whatever its curve was like before.
        """
        finite = np.isfinite(self.value)
        if not finite.any():
            return len(finite)
        return int(finite[::-1].argmax())


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> ProbeResult:
    """Judges the curve of a run: does it fall, does it stay low, is its end finite?

        traces, unreadable = open_traces(["run.csv"])
        result = probe_loss(traces[0])
        print(result.verdict, [check.message for check in result.checks])

    Ignores rows that the run repeated later.

    Args:
        trace: a trace with a loss. A gradient norm is judged too if it is logged.
        inputs: the bounds, or None for the defaults.

    Returns:
        The checks, and facts for a plot of the curve.

    Raises:
        NothingToProbe: the trace does not log a loss.
    """
    inputs = inputs or LossInputs()
    rows = lineage(trace)
    curve = _column(rows, "loss")
    norms = _column(rows, "grad_norm")
    if not len(curve.value):
        raise NothingToProbe(f"{trace.name} logs no loss: pass --column loss=NAME")
    finite = curve.finite
    steps = curve.step[np.isfinite(curve.value)]
    found = find_events(steps, finite, inputs.event_sigmas, inputs.rolling_window)
    facts = _measure(trace, curve, found)
    checks = [_finite(curve, inputs, trace.unit)]
    if len(norms.value):
        checks.append(_gradient_norm(norms))
    missing = missing_signals(trace)
    for at, (check, signal) in enumerate(zip(checks, JUDGED_SIGNALS, strict=False)):
        if signal in missing:
            message = f"{check.message}; {missing[signal]}, which may be NaN"
            verdict = worst([check.verdict, WARN])
            checks[at] = check._replace(verdict=verdict, message=message)
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
            _events(*found, inputs, trace.unit),
        ]
    facts["score"] = score(checks, _FATAL, {**inputs.weights})
    notes = _notes(trace, len(finite), inputs)
    return ProbeResult("loss", trace.name, tuple(checks), facts, tuple(notes))


def _column(rows: Rows, name: str) -> Column:
    """The logged values of a signal, and their steps. Empty if no row logs the signal."""
    logged = rows.logged.get(name, np.zeros(len(rows.step), bool))
    values = rows.values.get(name, rows.step)[logged]
    return Column(rows.step[logged], values.astype(np.float64))


def _measure(
    trace: Trace, curve: Column, found: tuple[list[InstabilityEvent], int, bool]
) -> dict[str, Any]:
    """The facts of a curve, without a judgement; `found` is the result of `find_events`."""
    events, jumps, _ = found
    finite = curve.finite
    kept = thin({"value": curve.value}, _CURVE_POINTS)
    return {
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


def _notes(trace: Trace, number: int, inputs: LossInputs) -> list[str]:
    """What could not be read, was repeated or cannot be judged; `number` is of finite losses."""
    notes = first_lines(trace.problems, 100)
    repeated = int(np.count_nonzero(trace.replaced))
    if repeated:
        rows_text = counted(repeated, "row was", "rows were")
        notes.append(f"{rows_text} repeated after a resume or a rollback; the last counts")
    if number >= inputs.min_steps:
        learnt = values_to_learn(number, inputs.rolling_window)
        notes.append(
            f"an instability event within the first {learnt} values is not found, because the "
            "detector learns the noise of the curve there; look at them yourself"
        )
    return notes


def _finite(column: Column, inputs: LossInputs, unit: str) -> Check:
    """Counts NaN and Inf: FAIL at the end of the curve, WARN if the run recovered."""
    bad = column.nonfinite_count
    total = len(column.value)
    trailing = column.trailing_count
    message = f"all {total} values are finite"
    if bad:
        message = f"{bad} of {total} values are NaN or Inf"
    verdict = PASS
    if trailing:
        verdict = FAIL
        last = f"{trailing} values are" if trailing > 1 else "value is"
        message = f"it ends in NaN or Inf: the last {last} not finite ({bad} of {total} in all)"
    elif bad > inputs.max_nonfinite:
        verdict = WARN
        message += f", first at {unit} {column.step[~np.isfinite(column.value)][0]:.15g}"
    return Check("finite", verdict, message, bad, inputs.max_nonfinite)


def _gradient_norm(norms: Column) -> Check:
    """Counts norms that are NaN or Inf: FAIL for several at the end, WARN if they are not rare."""
    bad = norms.nonfinite_count
    total = len(norms.value)
    last = norms.trailing_count
    verdict = PASS
    if last >= _LASTING_NORMS:
        verdict = FAIL
    elif bad > _RARE_NORMS * total:
        verdict = WARN
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
    """Checks that the level at the end is below the bound, if the user has set a bound."""
    value = shape.end
    bound = inputs.max_final_loss
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
    rise = shape.end - shape.start
    sigma = math.sqrt(2) * shape.noise
    sign = math.copysign(1, rise)
    distance = 0.0
    if sigma > 0:
        distance = rise / sigma
    elif rise:
        distance = sign * math.inf
    span = f"from {shape.start:.4g} to {end}"
    measured = f"trend {trend:+.1f} sigma, end against start {distance:+.1f} sigma"
    measured += f"; significant from {bound:g} sigma"
    if rise and max(trend * sign, abs(distance)) > bound:
        verdict, verb = PASS, "falls"
        if rise > 0:
            verdict, verb = FAIL, "rises"
        value = distance
        if trend * sign > bound:
            value = trend
        return Check("progress", verdict, f"it {verb}, {span} ({measured})", value, bound)
    if shape.drop > bound:
        message = f"it falls within its first values, by {shape.drop:.1f} sigma, and stays at {end}"
        return Check("progress", PASS, message, shape.drop, bound)
    value = max(trend, distance, key=abs)
    reason = ": the change is within the noise"
    if abs(trend) > bound:
        reason = ", but the trend has the opposite direction"
    message = f"{span}{reason} ({measured})"
    if finite.min() <= 0 <= finite.max():
        # The loss of a policy gradient is about 0 by construction.
        message += "; a curve with both signs need not progress"
        return Check("progress", PASS, message, value, bound)
    return Check("progress", WARN, f"{message}: no progress", value, bound)


def _convergence_ratio(shape: Shape, finite: np.ndarray, inputs: LossInputs) -> Check:
    """Checks that the level at the end is below that at the start, times the bound."""
    name = "convergence_ratio"
    bound = inputs.max_convergence_ratio
    if finite.min() <= 0 or shape.start <= 0:
        return Check(name, SKIP, "only defined for losses above 0", None, bound, decides=False)
    value = shape.end / shape.start
    noise = 0.0
    if bound >= 1:
        noise = math.sqrt(2) * inputs.trend_sigmas * shape.noise / shape.start
    verdict = WARN if value > bound + noise else PASS
    message = f"the end is {value:.4g} of the start; should be at most {bound:g}"
    return Check(name, verdict, message, value, bound)


def _regret(shape: Shape, inputs: LossInputs) -> Check:
    """Judges the share of the progress to the best value that is lost at the end."""
    warn = inputs.warn_regret
    fail = inputs.fail_regret
    bound = [warn, fail]
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
    if lost >= 1:
        message = (
            f"at the end, all progress to the best ({best}) is lost: the end, {shape.end:.4g}, is "
            f"no better than the start, {shape.start:.4g}; "
        )
    message += f"WARN above {warn:.0%}, FAIL above {fail:.0%}"
    verdict = PASS
    if lost > fail:
        verdict = FAIL
    elif lost > warn:
        verdict = WARN
    return Check("regret", verdict, message, lost, bound)


def _smoothness(curve: Column, inputs: LossInputs) -> Check:
    """Compares 1 - var(dL) / var(L) of finite neighbours with its bound."""
    name = "smoothness"
    bound = inputs.min_smoothness
    finite = curve.finite
    variance = _variance(finite)
    if not 0 < variance < math.inf:
        return Check(name, SKIP, "not defined for a constant curve", None, bound, decides=False)
    with np.errstate(invalid="ignore", over="ignore"):
        changes = np.diff(curve.value)
        changes = changes[np.isfinite(changes)]
        value = 1 - _variance(changes) / variance
    message = f"{value:.3f}; should be at least {bound:g} (noise around a level has -1)"
    reliable = len(finite) >= _MIN_VALUES_FOR_SMOOTHNESS
    verdict = WARN if value < bound else PASS
    return Check(name, verdict, message, value, bound, decides=reliable)


def _variance(values: np.ndarray) -> float:
    """The variance of values (n,), 0 without values, inf or NaN if the values are too large."""
    if not len(values):
        return 0.0
    with np.errstate(invalid="ignore", over="ignore"):
        return float(values.var())


def _events(
    events: list[InstabilityEvent], jumps: int, unfinished: bool, inputs: LossInputs, unit: str
) -> Check:
    """Judges the number of instability events, and whether the curve ends in one."""
    count = len(events)
    bound = inputs.max_events
    message = "none"
    if events:
        named = [f"{unit} {each.step:.15g} for {counted(each.values, 'value')}" for each in events]
        message = (
            f"{counted(count, 'event')} far above the level before, the first at "
            f"{first_of(named, _MAX_NAMED)}"
        )
    message += f" ({counted(jumps, 'single high value')}"
    verdict = PASS
    if count > bound:
        verdict = WARN
    if inputs.max_jumps is not None and jumps > inputs.max_jumps:
        verdict = WARN
        message += f"; should be at most {inputs.max_jumps}"
    message += ")"
    if unfinished:
        message += f"; the curve ends in the event of {unit} {events[-1].step:.15g}"
        verdict = FAIL
    return Check("instability_events", verdict, message, count, bound)
