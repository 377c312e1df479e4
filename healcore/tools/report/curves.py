"""From rows, however many, to the curves of a story."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from healcore.tools.report.case import Case
from healcore.tools.report.metric_lines import CURVES, Chunk
from healcore.tools.report.story import Incident, Series
from healcore.tools.report.tally import Tally
from healcore.tools.traces.envelope import Envelope

ROWS = 9000
"""Most rows that are kept: some 450 stretches of which all extremes stay, or more."""

_WHOLE = 2.0**24
"""Float32, in which an envelope keeps its columns, has all whole numbers up to here."""


class Gathered(NamedTuple):
    """What the rows have told."""

    series: Series
    incidents: tuple[Incident, ...]
    """With their `onset` and `index`."""
    tally: Tally | None
    """None: the rows do not tell what the policy made of them."""


def gather(
    chunks: Iterable[Chunk],
    incidents: Sequence[Incident],
    capped: Mapping[int, Case] = MappingProxyType({}),
) -> Gathered:
    """Thins the curves, finds the rows of the incidents, and counts.

    Args:
        chunks: of one run, in order.
        incidents: by attempt and step.
        capped: by place in `incidents`: those of which the rows may know more alarms.
    """
    envelope = Envelope(limit=ROWS)
    tally = Tally(incidents)
    wanted = {(case.attempt, at) for case in incidents for at in (case.onset_step, case.step)}
    attempts = {attempt for attempt, _ in wanted}
    found: dict[tuple[int, float], int] = {}
    seen: set[str] = set()
    rows = 0
    for chunk in chunks:
        index = np.arange(rows, rows + len(chunk.step))
        rows += len(index)
        tally.add(chunk, index)
        seen |= {name for name, values in chunk.values.items() if np.any(~np.isnan(values))}
        marked = np.where(chunk.nonfinite, np.float32(1), np.float32(0))
        high, low = np.divmod(chunk.step, _WHOLE)
        aligned = {"high": high, "low": low, "attempt": chunk.attempt, "nonfinite": marked}
        envelope.add(index, {**chunk.values, **aligned})
        if attempts.intersection(chunk.attempt.tolist()):
            pairs = zip(chunk.attempt.tolist(), chunk.step.tolist(), strict=True)
            found |= {
                pair: i for pair, i in zip(pairs, index.tolist(), strict=True) if pair in wanted
            }
    series = _series(envelope, seen, rows)
    placed = []
    for place, case in enumerate(incidents):
        if tally.told and place in capped:
            case = tally.completed(place, capped[place])
        step, index = tally.ends.get(place, (-1.0, -1))
        index = index if step == case.step else found.get((case.attempt, case.step), -1)
        onset = found.get((case.attempt, case.onset_step), -1)
        placed.append(case._replace(onset=onset, index=index))
    return Gathered(series, tuple(placed), tally if tally.told else None)


def _series(envelope: Envelope, seen: set[str], rows: int) -> Series:
    if not rows:
        return Series(np.zeros(0), np.zeros(0, np.float32), rows=0)
    index, values = envelope.kept()
    nonfinite = values["nonfinite"] > 0
    curve = {name: values[name] if name in seen else None for name in CURVES}
    loss = values["loss"]
    return Series(
        step=values["high"].astype(np.float64) * _WHOLE + values["low"],
        loss=loss,
        grad_norm=curve["grad_norm"],
        threshold=curve["threshold"],
        lr_scale=curve["lr_scale"],
        index=index,
        attempt=values["attempt"].astype(np.int64),
        nonfinite=nonfinite,
        rows=rows,
    )
