"""Converts rows whose decision is not neutral to objects and to lines of JSON."""

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
from healcore.tools.replay.judged import JudgedRows
from healcore.tools.replay.summary import Summary, shortest


class Decided(NamedTuple):
    """One row with the decision of the policy. Observe mode has the same decisions."""

    index: int
    step: float
    """Recorded step, or NaN if the step could not be read."""
    attempt: int
    cause: Cause
    action: Action
    """Orders to the host, with ROLLBACK if a rollback was due."""
    skip: bool
    grad_scale: float
    lr_scale: float
    z: dict[str, float]
    """z scores by signal, for signals that the row logs and the policy scores."""
    threshold: float | None
    """Gradient norm above which the row would be clipped, or None for no limit."""
    spent: bool
    """Whether the budget denied a due rollback. A live run ends here."""


def select_decided(judged: JudgedRows, engine: Engine) -> Iterator[Decided]:
    """Yields the rows whose decision is not neutral, in order."""
    record, action, spent = judged.record, judged.action, judged.spent
    scores = _find_scores(judged, engine)
    clipping = scores.get("grad_norm")
    for row in np.flatnonzero(judged.decided):
        yield Decided(
            index=int(judged.index[row]),
            step=float(judged.step[row]),
            attempt=int(judged.attempt[row]),
            cause=Cause(int(record.cause[row])),
            action=Action(int(action[row])),
            skip=bool(record.skip[row]),
            grad_scale=shortest(record.grad_scale[row]),
            lr_scale=shortest(record.lr_scale[row]),
            z={name: shortest(z[row]) for name, (z, has) in scores.items() if has[row]},
            threshold=(shortest(record.threshold[row]) if clipping and clipping[1][row] else None),
            spent=bool(spent[row]),
        )


def _find_scores(judged: JudgedRows, engine: Engine) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Returns scores, and whether each is of its own row, by signal; others are of earlier rows."""
    scores = {}
    if engine.config.clip is not None and not engine.per_tensor and "grad_norm" in judged.logged:
        scores["grad_norm"] = (judged.record.z, judged.logged["grad_norm"])
    if "loss" in judged.logged and any(name == "loss_spike" for name, _ in engine.config.detectors):
        scores["loss"] = (judged.record.z_loss, judged.logged["loss"])
    return scores


def decided_line(trace: str, policy: str, row: Decided) -> str:
    """Returns one row as a line of JSON with a newline."""
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
    """Returns a summary as a line of JSON with a newline."""
    fields = asdict(summary, dict_factory=_numbers)
    line = {"trace": fields.pop("trace"), "summary": True, "steps": summary.rows - summary.unjudged}
    return _line(line | fields)


@functools.lru_cache(maxsize=4096, typed=True)  # typed: Cause(4) == Action(4)
def _names(flags: Cause | Action) -> list[str]:
    """Returns cached `names`: few combinations occur, and naming is the slowest part of a line."""
    return names(flags)


def _numbers(fields: list[tuple[str, Any]]) -> dict[str, Any]:
    return {name: _number(value) if isinstance(value, float) else value for name, value in fields}


def _number(number: float) -> float | int | str:
    """Converts integers to int, and NaN and Inf to text, because JSON has no such numbers."""
    if not math.isfinite(number):
        return str(number)
    return int(number) if number.is_integer() else number


def _line(line: dict[str, Any]) -> str:
    return json.dumps(line, allow_nan=False) + "\n"
