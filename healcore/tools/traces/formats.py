"""Recognizes the format of a file by its content, since logs are renamed, copied and cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from healcore.tools.traces.text import encoding_of
from healcore.tools.traces.trace import Findings, TraceError

Fields = dict[str, Any]

LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')


class RecordFormat(NamedTuple):
    """One way of writing steps as JSON objects."""

    name: str
    recognizes: Callable[[Fields], bool]
    """Whether a record proves that a JSON Lines file has this format."""
    fields: Callable[[Fields], Fields | None]
    """A record's numbers; None: it is not a step."""
    note: str = ""


def _flat(record: Fields) -> Fields:
    """Opens one level of nesting: {"train": {"loss": 1}} has "train/loss"."""
    if dict not in set(map(type, record.values())):
        return record
    flat: Fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": number for inner, number in value.items()})
        else:
            flat[key] = value
    return flat


def _event_fields(record: Fields) -> Fields | None:
    readings = record.get("readings")
    return {"step": record.get("step"), **readings} if isinstance(readings, dict) else None


EVENTS = RecordFormat(
    "healcore events",
    lambda record: {"seq", "mono", "kind", "run"} <= record.keys(),
    _event_fields,
    "an events file has the readings of steps with an alarm only, not the losses of healthy ones. "
    "The argument metrics= of Healer, heal and LightningHealingCallback writes them all",
)
METRICS = RecordFormat(
    "healcore metrics",
    lambda record: {"schema", "kind", "step"} <= record.keys(),
    lambda record: record if record.get("kind") == "step" else None,
)
TYPED = RecordFormat(
    "typed records",
    lambda record: record.get("type") == "step",
    lambda record: _flat(record) if record.get("type") == "step" else None,
)
PLAIN = RecordFormat("JSON Lines", lambda record: True, _flat)
DOCUMENT = RecordFormat(
    "trainer_state.json",
    lambda record: False,
    # The last record is a summary: its train_loss is the mean over the whole training.
    lambda record: None if "train_runtime" in record else _flat(record),
)
RECORD_FORMATS = {each.name: each for each in (EVENTS, METRICS, TYPED, PLAIN, DOCUMENT)}
"""In the order in which they are tried on the first records."""

TENSORBOARD = "TensorBoard events"
TABLE = "CSV"

PREFERRED = (METRICS.name, TYPED.name, DOCUMENT.name, TABLE, PLAIN.name, TENSORBOARD, EVENTS.name)
"""If a directory has a run's log in several formats, the first of these is read."""

KNOWN = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, a TensorBoard "
    "event file, or healcore's own metrics or events"
)


def format_of(start: bytes) -> str:
    """The format, of `PREFERRED`, by a file's first megabyte; TraceError if it has none."""
    if not start.strip():
        raise TraceError("it is empty")
    if b"brain.Event:" in start[:64]:
        return TENSORBOARD
    text = start.decode(encoding_of(start), errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary, and not {KNOWN}")
    if text.startswith("[") or LOG_HISTORY.search(text):
        return DOCUMENT.name
    records = _first_records(text)
    if records:
        return next(
            name for name, each in RECORD_FORMATS.items() if any(map(each.recognizes, records))
        )
    if text.startswith("{"):
        raise TraceError(f"it is JSON, but has no 'log_history' and is not {KNOWN}")
    return TABLE


def _first_records(text: str) -> list[Fields]:
    found = []
    for line in text.splitlines()[:200]:
        if line.lstrip().startswith("{"):
            try:
                value = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(value, dict):
                found.append(value)
    return found


def steps(
    records: Iterator[tuple[int, Fields]], form: RecordFormat, path: str, findings: Findings
) -> Iterator[tuple[int, Fields]]:
    """The records that are steps, with their numbers; the others are counted in a note."""
    others = 0
    for line, record in records:
        fields = form.fields(record)
        if fields is None:
            others += 1
        else:
            yield line, fields
    if others:
        plural = "s are" if others > 1 else " is"
        findings.note(path, None, f"{others:,} record{plural} not a step ({form.name}): ignored")
