"""The lines of `healcore replay --jsonl`: strict JSON, the same bytes from every backend."""

from __future__ import annotations

import functools
import json
import math
from typing import Any

from healcore.core.verdict import Action, Cause, names
from healcore.tools.replay.decided import Decided
from healcore.tools.replay.summary import Summary


def decided_line(trace: str, policy: str, row: Decided) -> str:
    """One row whose decision is not neutral, newline included."""
    told: dict[str, Any] = {
        "trace": trace,
        "index": row.index,
        "step": _number(row.step),
        "cause": _names(row.cause),
        "action": _names(row.action),
        "skip": row.skip,
        "grad_scale": row.grad_scale,
        "lr_scale": row.lr_scale,
        "z": row.z,
    }
    if row.threshold is not None:
        told["threshold"] = row.threshold
    told |= {"attempt": row.attempt, "policy": policy}
    if row.spent:
        told["spent"] = True
    return _line(told)


def summary_line(summary: Summary) -> str:
    """The summary of one trace under one policy, newline included."""
    told = {"trace": summary.trace, "summary": True, "steps": summary.rows - summary.unjudged}
    for name, value in summary._asdict().items():
        if name != "trace":
            told[name] = _number(value) if isinstance(value, float) else value
    told["attempts"] = [
        {**each._asdict(), "first_step": _number(each.first_step)} for each in summary.attempts
    ]
    return _line(told)


@functools.lru_cache(maxsize=4096, typed=True)  # typed: Cause(4) == Action(4)
def _names(flags: Cause | Action) -> list[str]:
    """As `names`; there are few different ones, and finding them takes longer than the rest."""
    return names(flags)


def _number(number: float) -> float | int | str:
    """A whole number as one; what JSON has no number for as text, as in the events."""
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() else number


def _line(told: dict[str, Any]) -> str:
    return json.dumps(told, allow_nan=False) + "\n"
