"""JSON Lines files by who writes them: which lines are steps, and where the numbers are in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from healcore.tools.traces.findings import Findings

Fields = dict[str, Any]


class Dialect(NamedTuple):
    """One way of writing steps into JSON Lines."""

    name: str
    spoken_in: Callable[[Fields], bool]
    """Is this record proof that the file is of this kind?"""
    fields: Callable[[Fields], Fields | None]
    """A record's numbers; None: it is not a step."""
    note: str | None = None
    """What every reader of such a file should know."""


def _flat(record: Fields) -> Fields:
    """One level of nesting opened: {"train": {"loss": 1}} has "train/loss"."""
    if dict not in set(map(type, record.values())):
        return record
    flat: Fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": number for inner, number in value.items()})
        else:
            flat[key] = value
    return flat


def _metrics(record: Fields) -> Fields | None:
    return record if record.get("kind") == "step" else None


def _events(record: Fields) -> Fields | None:
    readings = record.get("readings")
    return {"step": record.get("step"), **readings} if isinstance(readings, dict) else None


def _typed(record: Fields) -> Fields | None:
    return _flat(record) if record.get("type") == "step" else None


EVENTS = Dialect(
    "healcore events",
    lambda record: {"seq", "mono", "kind", "run"} <= record.keys(),
    _events,
    "an events file has the readings of alarmed steps only, not the losses of healthy ones. "
    "Healer(..., metrics=...) writes them all",
)
METRICS = Dialect(
    "healcore metrics", lambda record: {"schema", "kind", "step"} <= record.keys(), _metrics
)
TYPED = Dialect("typed records", lambda record: record.get("type") == "step", _typed)
PLAIN = Dialect("records", lambda record: True, _flat)

TRAINER = Dialect(
    "trainer_state.json",
    lambda record: False,
    # The last record sums the training up: its train_loss is a mean over all of it.
    lambda record: None if "train_runtime" in record else _flat(record),
)

DIALECTS = (EVENTS, METRICS, TYPED, PLAIN)
"""In the order in which they are tried on every one of the first records."""


def dialect_of(records: list[Fields]) -> Dialect:
    """Which dialect the first records of a file are written in."""
    return next(d for d in DIALECTS if d is PLAIN or any(d.spoken_in(r) for r in records))


def steps(
    records: Iterator[tuple[int, Fields]], dialect: Dialect, path: str, findings: Findings
) -> Iterator[tuple[int, Fields]]:
    """The records that are steps, with their numbers; the others are counted."""
    others = 0
    for line, record in records:
        fields = dialect.fields(record)
        if fields is None:
            others += 1
        else:
            yield line, fields
    if others:
        plural = "s are" if others > 1 else " is"
        text = f"{others:,} record{plural} not a step's ({dialect.name}): passed over"
        findings.note(path, None, text)
