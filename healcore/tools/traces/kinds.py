"""What a file is, by what is in it. Names are not asked: logs are renamed, copied and cut."""

from __future__ import annotations

import json
from typing import Any

from healcore.tools.traces.dialects import EVENTS, METRICS, TRAINER, TYPED, dialect_of
from healcore.tools.traces.document import LOG_HISTORY
from healcore.tools.traces.text import UTF16
from healcore.tools.traces.trace import TraceError

TENSORBOARD = "TensorBoard events"
DOCUMENT = TRAINER.name
TABLE = "CSV"
RECORDS = "JSON Lines"

PREFERRED = (METRICS.name, TYPED.name, DOCUMENT, TABLE, RECORDS, TENSORBOARD, EVENTS.name)
"""In a directory that holds a run's log in several kinds the first of these is read."""

KNOWN = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, a TensorBoard "
    "event file, or healcore's own metrics or events"
)


def kind_of(start: bytes) -> str:
    """The kind of a file.

    Args:
        start: the first megabyte of its content.

    Returns:
        One of `PREFERRED`.

    Raises:
        TraceError: it is empty, or none of them.
    """
    if not start.strip():
        raise TraceError("it is empty")
    if b"brain.Event:" in start[:64]:
        return TENSORBOARD
    encoding = "utf-16" if start[:2] in UTF16 else "utf-8-sig"
    text = start.decode(encoding, errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary, and not {KNOWN}")
    if text.startswith("[") or LOG_HISTORY.search(text):
        return DOCUMENT
    records = _records(text)
    if records:
        dialect = dialect_of(records)
        return dialect.name if dialect in (METRICS, TYPED, EVENTS) else RECORDS
    if text.startswith("{"):
        raise TraceError(f"it is JSON, but has no 'log_history' and is not {KNOWN}")
    return TABLE


def _records(text: str) -> list[dict[str, Any]]:
    """Those of the first lines that are JSON objects by themselves."""
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
