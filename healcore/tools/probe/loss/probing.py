"""The loss probe: is this the curve of a healthy run?"""

from __future__ import annotations

from typing import Any

import numpy as np

from healcore.history.envelope import Envelope
from healcore.tools.probe.loss import judging
from healcore.tools.probe.loss.events import Events
from healcore.tools.probe.loss.incidents import Incidents
from healcore.tools.probe.loss.logged import Logged, logged
from healcore.tools.probe.loss.reduction import Reduction
from healcore.tools.probe.loss.shape import shape
from healcore.tools.probe.loss.thresholds import LossInputs
from healcore.tools.probe.verdict import Check, NothingToProbe, Result, Verdict
from healcore.tools.traces.trace import Survey, Trace


def probe_loss(trace: Trace, inputs: LossInputs | None = None) -> Result:
    """Probes the curve that a run ended with, in bounded memory.

    Args:
        trace: any kind that `open_traces` reads.
        inputs: thresholds.

    Raises:
        NothingToProbe: the trace does not log the signal.
        TraceError: it cannot be read.
    """
    inputs = inputs or LossInputs()
    survey = trace.survey()
    if inputs.signal not in survey.signals:
        there = ", ".join(sorted(survey.signals)) or "nothing that healcore knows"
        raise NothingToProbe(
            f"{trace.name} logs no {inputs.signal}, only {there}: pass --signal for another one, "
            f"or --column {inputs.signal}=NAME if a column has it"
        )
    sign = 1.0 if inputs.goal == "down" else -1.0
    reduction = Reduction()
    events = Events(inputs.event_sigmas, inputs.event_points)
    # Of losses: it was made for their noise, and finds much in the norms of healthy runs.
    losses = inputs.signal in ("loss", "eval_loss")
    incidents = Incidents(inputs.event_sigmas, inputs.event_points) if losses else None
    thinned = Envelope(inputs.curve_points)
    by_step = None
    for chunk in logged(trace, inputs.signal):
        if by_step is None:
            by_step = bool((chunk.step == np.rint(chunk.step)).all())
        places = np.rint(chunk.step).astype(np.int64) if by_step else chunk.index
        thinned.add(places, {"value": chunk.value})
        values = reduction.add(Logged(chunk.index, chunk.step, sign * chunk.value))
        steps = chunk.step[np.isfinite(chunk.value)]
        events.add(steps, values)
        if incidents is not None:
            incidents.add(steps, values)
    events.finish()
    if incidents is not None:
        events.include(incidents.finish())
    facts = {
        **_facts(reduction, events, sign),
        "curve": _curve(thinned, "step" if by_step else "row"),
    }
    checks = _checks(reduction, events, inputs, sign, facts)
    return Result("loss", trace.name, tuple(checks), facts, tuple(_notes(survey)))


def _checks(
    reduction: Reduction, events: Events, inputs: LossInputs, sign: float, facts: dict[str, Any]
) -> list[Check]:
    finite = judging.finite(reduction.finiteness, inputs)
    if reduction.finite < inputs.min_steps:
        message = (
            f"{reduction.finite} finite value{'s' * (reduction.finite != 1)}, at least "
            f"{inputs.min_steps} are needed to say anything of the curve"
        )
        return [finite, Check("length", Verdict.SKIP, message, reduction.finite, inputs.min_steps)]
    seen = shape(reduction.blocks.medians(), inputs.ends)
    facts |= {
        "start": sign * seen.start,
        "end": sign * seen.end,
        "best_so_far": sign * seen.best,
        "regret": seen.regret,
        "noise": seen.noise,
    }

    def told(value: float) -> float:
        return sign * value

    return [
        finite,
        judging.final(seen, inputs, told),
        judging.progress(seen, reduction, inputs, told),
        judging.ratio(seen, reduction, inputs),
        judging.regret(seen, inputs, told),
        judging.smoothness(reduction, inputs),
        judging.events(events, inputs),
    ]


def _facts(reduction: Reduction, events: Events, sign: float) -> dict[str, Any]:
    return {
        "values": reduction.finiteness.values,
        "first_step": reduction.first_step,
        "last_step": reduction.last_step,
        "last": sign * reduction.last if reduction.finite else None,
        "best": sign * reduction.best if reduction.finite else None,
        "nonfinite": reduction.finiteness.nonfinite,
        "events": events.found,
        "jumps": events.jumps,
    }


def _curve(thinned: Envelope, of: str) -> dict[str, Any]:
    places, curves = thinned.kept()
    return {of: places, "value": curves.get("value", np.empty(0))}


def _notes(survey: Survey) -> list[str]:
    told = [str(problem) for problem in survey.problems]
    if survey.problem_count > len(told):
        told.append(f"{survey.problem_count - len(told)} further problems in this trace")
    if survey.stale:
        told.append(f"{survey.stale} rows were replaced by a resume; the last time counts")
    return told
