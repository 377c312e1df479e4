"""The rows whose decision is not neutral, as objects and as lines of JSON."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from healcore.core.engine import Engine
from healcore.core.verdict import Action, Cause, names
from healcore.tools.replay.summary import JudgedRows, Summary, shortest


class Decided(NamedTuple):
    """One row, with the decision of the policy (in observe mode too)."""

    index: int
    step: float
    """The recorded step; NaN if it could not be read."""
    attempt: int
    cause: Cause
    action: Action
    """Contains ROLLBACK wherever a rollback was due."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z score of each signal that the row has and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped; None without such a limit."""
    spent: bool
    """A rollback was due and the budget denied it: a live run ends here."""


def decided(judged: JudgedRows, engine: Engine) -> Iterator[Decided]:
    """The rows of a chunk whose decision is not neutral, in order."""
    record, action, spent = judged.record, judged.action, judged.spent
    scored = _scored(judged, engine)
    limits = scored.get("grad_norm")
    for row in np.flatnonzero(judged.decided):
        yield Decided(
            index=int(judged.index[row]),
            step=float(judged.step[row]),
            attempt=judged.attempt,
            cause=Cause(int(record.cause[row])),
            action=Action(int(action[row])),
            skip=bool(record.skip[row]),
            grad_scale=shortest(record.grad_scale[row]),
            lr_scale=shortest(record.lr_scale[row]),
            z={name: shortest(z[row]) for name, (z, has) in scored.items() if has[row]},
            threshold=(
                None if limits is None or not limits[1][row] else shortest(record.threshold[row])
            ),
            spent=bool(spent[row]),
        )


def _scored(judged: JudgedRows, engine: Engine) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """(scores, rows that have one) by signal; in other rows the record has an older row's score."""
    scored = {}
    if engine.config.clip is not None and not engine.per_tensor and "grad_norm" in judged.given:
        scored["grad_norm"] = (judged.record.z, judged.given["grad_norm"])
    if "loss" in judged.given and any(name == "loss_spike" for name, _ in engine.config.detectors):
        scored["loss"] = (judged.record.z_loss, judged.given["loss"])
    return scored


def decided_line(trace: str, policy: str, row: Decided) -> str:
    """One row whose decision is not neutral, newline included."""
    line: dict[str, Any] = {
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
        line["threshold"] = row.threshold
    line |= {"attempt": row.attempt, "policy": policy}
    if row.spent:
        line["spent"] = True
    return _line(line)


def summary_line(summary: Summary) -> str:
    """The summary of one trace under one policy, newline included."""
    fields = asdict(summary, dict_factory=_numbers)
    line = {"trace": fields.pop("trace"), "summary": True, "steps": summary.rows - summary.unjudged}
    return _line(line | fields)


@functools.lru_cache(maxsize=4096, typed=True)  # typed: Cause(4) == Action(4)
def _names(flags: Cause | Action) -> list[str]:
    """Cached `names`: few combinations occur, and naming them is the slowest part of a line."""
    return names(flags)


def _numbers(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _number(each) if isinstance(each, float) else each for name, each in fields}


def _number(number: float) -> float | int | str:
    """Whole numbers as int; what JSON cannot express (NaN, Inf) as text, as in the events."""
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
