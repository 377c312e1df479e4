"""Reads files of records (JSON Lines, JSON documents, console output)."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from healcore.tools.traces.attempts import Log
from healcore.tools.traces.columns import Findings, TraceError
from healcore.tools.traces.names import STEP, resolve
from healcore.tools.traces.text import (
    RowCollector,
    numbered_lines,
    open_text,
    quote_excerpt,
)

Fields = dict[str, Any]
"""A record: JSON values by name."""

Records = Callable[[Findings], Iterator[tuple[int, Fields]]]
"""Begins a pass over the line numbers (0 in a format without lines) and fields of records."""

_MAX_RECORD = 1 << 24
"""Largest number of characters of a line, which bounds the memory."""
_MAX_DOCUMENT = 1 << 30
"""Largest number of characters of a JSON document, which is in memory as a whole."""
_MAX_PRINTED = 1 << 12
"""Largest number of characters of a printed dict."""
LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_LIST = re.compile(r"\s*\[")
_GAP = re.compile(r"[\s,]*")
_PYTHON = re.compile(
    r"""("[^"\\]*")|'([^'\\]*)'|\b(nan|inf|None|True|False)\b|(?:np\.\w+|tensor)\(|\.?\)"""
)
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "None": "null", "True": "true", "False": "false"}


# -- files of JSON ---------------------------------------------------------------------------------


def json_lines(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Yields line number and object for each line of JSON. Skips damaged lines."""
    decode = json.JSONDecoder().raw_decode
    with open_text(path) as file:
        for number, line in numbered_lines(path, file, findings, longest=_MAX_RECORD):
            text = line.strip()
            if not text:
                continue
            try:
                value, end = decode(text)
            except (ValueError, RecursionError):
                cut = "" if line.endswith(("\n", "\r")) else " (the last line is truncated)"
                findings.problem(path, number, f"not JSON{cut}: {quote_excerpt(text)}: skipped")
                continue
            if end != len(text) or not isinstance(value, dict):
                what = "more than one JSON value" if end != len(text) else "not a JSON object"
                findings.problem(path, number, f"{what}: {quote_excerpt(text)}: skipped")
                continue
            yield number, value


def console_lines(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Yields line number and record for each line that ends in a dict as Python prints it."""
    with open_text(path) as file:
        for number, line in numbered_lines(path, file, findings, longest=_MAX_RECORD):
            record = printed_record(line)
            if record is not None:
                yield number, record
            elif "{'" in line:
                findings.problem(path, number, f"not a dict: {quote_excerpt(line)}: skipped")


def printed_record(line: str) -> Fields | None:
    """Returns the dict at the end of a printed line, after a progress bar or other text."""
    _, found, rest = line.rstrip().partition("{'")
    if not found or not rest.endswith("}") or len(rest) > _MAX_PRINTED:
        return None
    try:
        return json.loads(_PYTHON.sub(_to_json, found + rest))
    except (ValueError, RecursionError):
        return None


def _to_json(token: re.Match[str]) -> str:
    quoted, text, name = token.groups()
    return quoted or (_JSON_NAMES.get(name, "") if text is None else json.dumps(text))


def json_document(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Yields line number and record for each record of a JSON document, up to damage.

    The document is a list of records, or an object with the list "log_history"
    (`trainer_state.json` of Hugging Face's Trainer). The records are parsed one by one, because
    `json.loads` returns nothing for a truncated document.
    """
    with open_text(path) as file:
        text = file.read(_MAX_DOCUMENT)
    decode = json.JSONDecoder().raw_decode
    opened = _LIST.match(text) or LOG_HISTORY.search(text)
    at = opened.end() if opened else len(text)
    line = 1 + text.count("\n", 0, at)
    while opened:
        gap = _GAP.match(text, at)
        start = gap.end() if gap else at
        line += text.count("\n", at, start)
        if text.startswith("]", start):
            return
        try:
            value, at = decode(text, start)
        except (ValueError, RecursionError):
            rest = text[start : start + 60]
            where = quote_excerpt(rest) if rest else "the end of the file"
            problem = f"the document ends or is damaged at {where}: the rest is lost"
            findings.problem(path, line, problem)
            return
        if isinstance(value, dict):
            yield line, value
        else:
            problem = f"not a record: {quote_excerpt(str(value))}: skipped"
            findings.problem(path, line, problem)
        line += text.count("\n", start, at)


# -- formats -------------------------------------------------------------------------------------


class RecordFormat(NamedTuple):
    """A format that writes steps as JSON objects."""

    name: str
    recognizes: Callable[[Fields], bool]
    """Whether a record proves that a JSON Lines file has this format."""
    fields: Callable[[Fields], Fields | None]
    """Returns the fields of a step, or None for a record that is not a step."""


def _flatten(record: Fields) -> Fields:
    """Flattens one level of nesting: {"train": {"loss": 1}} becomes {"train/loss": 1}."""
    if dict not in set(map(type, record.values())):
        return record
    flat: Fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": number for inner, number in value.items()})
        else:
            flat[key] = value
    return flat


METRICS = RecordFormat(
    "healcore metrics",
    lambda record: record.get("kind") == "step" and "schema" in record,
    lambda record: record if record.get("kind") == "step" else None,
)
TYPED = RecordFormat(
    "typed records",
    lambda record: record.get("type") == "step",
    lambda record: _flatten(record) if record.get("type") == "step" else None,
)
PLAIN = RecordFormat("JSON Lines", lambda record: True, _flatten)
DOCUMENT = RecordFormat(
    "trainer_state.json",
    lambda record: False,
    # The last record is a summary, whose train_loss is the mean over the whole training.
    lambda record: None if "train_runtime" in record else _flatten(record),
)


CONSOLE = DOCUMENT._replace(name="console output")


def read_records(path: str, form: RecordFormat, columns: Mapping[str, str]) -> list[Log]:
    """Reads the logs in a file: one log, or one for each optimizer in a healcore metrics file.

    Raises as `rows_of_records`.
    """
    read = {DOCUMENT: json_document, CONSOLE: console_lines}.get(form, json_lines)

    def steps_of(engine: str | None, findings: Findings) -> Iterator[tuple[int, Fields]]:
        for line, record in read(path, findings):
            fields = form.fields(record)
            if fields is not None and (engine is None or fields.get("engine") == engine):
                yield line, fields

    engines: list[str | None] = []
    if form is METRICS:
        records = (record for _, record in read(path, Findings()) if "engine" in record)
        engines += dict.fromkeys(str(record["engine"]) for record in records)
    if len(engines) < 2:
        engines = [None]
    return [
        rows_of_records(path, functools.partial(steps_of, engine), columns, run=engine)
        for engine in engines
    ]


# -- rows ------------------------------------------------------------------------------------------


def rows_of_records(
    path: str,
    records: Records,
    columns: Mapping[str, str],
    *,
    run: str | None = None,
) -> Log:
    """Reads one file of records twice: the first pass collects the keys.

    `run` is the optimizer, if the file has several. Raises TraceError if no record has a loss or a
    gradient norm, or two keys may be the same signal.
    """
    names: dict[str, None] = {}  # a set that keeps the order of the file
    findings = Findings()
    for _, fields in records(findings):
        if not fields.keys() <= names.keys():
            names.update(dict.fromkeys(fields))
    if not names:
        first = f": {findings.problems[0]}" if findings.problems else ""
        raise TraceError(f"it has no record that could be read{first}")
    keys, notes = resolve(list(names), columns)
    findings = Findings()
    findings.notes += notes
    collector = RowCollector(path, {name: f"'{key}'" for name, key in keys.items()}, findings)
    for line, fields in records(findings):
        cells = [fields.get(key) for key in keys.values()]
        if any(cell is not None for name, cell in zip(keys, cells, strict=True) if name != STEP):
            collector.add(cells, line)
    return collector.log(run)
