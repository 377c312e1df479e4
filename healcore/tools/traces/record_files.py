"""Reads files of records (JSON Lines, JSON documents), and converts records to rows."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from healcore.tools.traces.names import PROBED, STEP, check_one_run, is_run, resolve
from healcore.tools.traces.text import (
    READ_ERRORS,
    describe_damage,
    numbered_lines,
    open_text,
    parse_rows,
    quote_excerpt,
)
from healcore.tools.traces.trace import CHUNK, Findings, Rows, TraceError

Fields = dict[str, Any]
"""A record: JSON values by name."""

Records = Callable[[Findings], Iterator[tuple[int, Fields]]]
"""Begins a pass over the line numbers (0 in a format without lines) and fields of records."""

_MAX_FIELDS = 256
"""In a record with more fields, only the fields that are read are kept."""
_MAX_RECORD = 1 << 24
"""Largest number of characters of a record, which bounds the memory."""
_MAX_UNSHORTENED = 1 << 12
"""A record with more characters is shortened."""
_SCALARS = frozenset((float, int, bool, type(None)))
_MAX_TEXT = 400
"""Number of characters of a text that are kept; a number written as text has fewer."""
_BLOCK = 1 << 16
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
            yield number, value if len(text) < _MAX_UNSHORTENED else _shorten(value)


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
    if not found or not rest.endswith("}") or len(rest) > _MAX_UNSHORTENED:
        return None
    try:
        return json.loads(_PYTHON.sub(_to_json, found + rest))
    except (ValueError, RecursionError):
        return None


def _to_json(token: re.Match[str]) -> str:
    quoted, text, name = token.groups()
    return quoted or (_JSON_NAMES.get(name, "") if text is None else json.dumps(text))


def _shorten(record: Fields, *, nested: bool = False) -> Fields:
    """Removes lists and deeper nesting from a long record, which no reader uses.

    Thousands of records are in memory at a time, and lists take twenty times the size of the text.
    """
    short: Fields = {}
    for key, value in record.items():
        if type(value) is dict and not nested:
            short[key] = _shorten(value, nested=True)
        elif type(value) in _SCALARS:
            short[key] = value
        else:
            short[key] = value[:_MAX_TEXT] if type(value) is str else f"a {type(value).__name__}"
    return short


def json_document(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Yields line number and record for each record of a JSON document, up to damage.

    The document is a list of records, or an object with the list "log_history"
    (`trainer_state.json` of Hugging Face's Trainer). json parses the records one by one from a
    window, so that the whole document is never in memory. ijson would stop at the first damaged
    record, and would be another dependency of every installation.
    """
    decode = json.JSONDecoder().raw_decode
    text, line, opened = "", 1, False
    with open_text(path) as file:
        try:
            # The window doubles, so that the time is linear in the length of a record.
            while len(text) < _MAX_RECORD and (block := file.read(max(_BLOCK, len(text)))):
                at_start, text = not text, text + block
                at = counted = 0
                if not opened:
                    found = (at_start and _LIST.match(text)) or LOG_HISTORY.search(text)
                    at = found.end() if found else max(0, len(text) - 64)
                    opened = bool(found)
                while opened:
                    gap = _GAP.match(text, at)
                    at = gap.end() if gap else at
                    if text.startswith("]", at):
                        return
                    try:
                        value, end = decode(text, at)
                    except (ValueError, RecursionError):
                        break  # its end may be in the next block
                    line += text.count("\n", counted, at)
                    counted, start, at = at, at, end
                    if isinstance(value, dict):
                        yield line, value if end - start < _MAX_UNSHORTENED else _shorten(value)
                    else:
                        problem = f"not a record: {quote_excerpt(str(value))}: skipped"
                        findings.problem(path, line, problem)
                line += text.count("\n", counted, at)
                text = text[at:]
        except READ_ERRORS as error:
            findings.problem(path, line, describe_damage(error))
            return
    if opened:
        rest = quote_excerpt(text) if text else "the end of the file"
        findings.problem(path, line, f"the document ends or is damaged at {rest}: the rest is lost")


# -- formats -------------------------------------------------------------------------------------


class RecordFormat(NamedTuple):
    """A format that writes steps as JSON objects."""

    name: str
    recognizes: Callable[[Fields], bool]
    """Whether a record proves that a JSON Lines file has this format."""
    fields: Callable[[Fields], Fields | None]
    """Returns the fields of a step, or None for a record that is not a step."""
    note: str = ""
    """Note about every file of this format, or an empty string."""


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


def _event_fields(record: Fields) -> Fields | None:
    readings = record.get("readings")
    return {"step": record.get("step"), **readings} if isinstance(readings, dict) else None


EVENTS = RecordFormat(
    "healcore events",
    lambda record: {"seq", "mono", "kind", "run"} <= record.keys(),
    _event_fields,
    "an events file has only the readings of steps with an alarm, not the losses of healthy steps. "
    "The argument metrics= of Healer, heal and LightningHealingCallback writes all losses",
)
METRICS = RecordFormat(
    "healcore metrics",
    lambda record: {"schema", "kind", "step"} <= record.keys(),
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


def open_records(path: str, form: RecordFormat, columns: Mapping[str, str]) -> list[RecordReader]:
    """Opens the logs in a file: one log, or one for each optimizer in a healcore metrics file."""
    read = {DOCUMENT: json_document, CONSOLE: console_lines}.get(form, json_lines)

    def steps_of(engine: str | None, findings: Findings) -> Iterator[tuple[int, Fields]]:
        steps = _steps(read(path, findings), form, path, findings)
        if engine is None:
            return steps
        return ((line, step) for line, step in steps if step.get("engine") == engine)

    engines: list[str | None] = []
    first = [record for _, record in itertools.islice(read(path, Findings()), PROBED)]
    if form is METRICS:
        engines += dict.fromkeys(str(record["engine"]) for record in first if "engine" in record)
    if form in (PLAIN, DOCUMENT):
        for key in filter(is_run, first[0] if first else ()):
            check_one_run(key, [each.get(key) for each in first], columns)
    if len(engines) < 2:
        engines = [None]
    return [
        RecordReader(path, functools.partial(steps_of, engine), columns, run=engine, note=form.note)
        for engine in engines
    ]


def _steps(
    records: Iterator[tuple[int, Fields]], form: RecordFormat, path: str, findings: Findings
) -> Iterator[tuple[int, Fields]]:
    """Yields line number and fields of each step. A note counts the other records."""
    others = 0
    for line, record in records:
        fields = form.fields(record)
        if fields is None:
            others += 1
        else:
            yield line, fields
    if others:
        plural = "s are" if others > 1 else " is"
        findings.note(path, None, f"{others:,} record{plural} not a step ({form.name}): skipped")


# -- rows ------------------------------------------------------------------------------------------


class RecordReader:
    """Reads one file of records. The constructor reads the first records to choose the keys.

    `run` is the optimizer, if the file has several. With `tags`, every record has one number, most
    records have no signal, and no note counts these. Raises TraceError if no record has a loss or a
    gradient norm, or two keys may be the same signal.
    """

    def __init__(
        self,
        path: str,
        records: Records,
        columns: Mapping[str, str],
        *,
        run: str | None = None,
        note: str = "",
        tags: bool = False,
    ) -> None:
        self.path = path
        self.run = run
        self.rows_read = 0
        self._records = records
        self._tags = tags
        self._known_keys, (self._signal_keys, notes) = self._choose_keys(columns)
        self.notes = [*notes, *([note] if note else [])]

    def _choose_keys(
        self, columns: Mapping[str, str]
    ) -> tuple[set[str], tuple[dict[str, str], list[str]]]:
        keys: dict[str, None] = {}  # a set that keeps the order of the file
        findings = Findings()
        seen = 0
        for seen, (_, fields) in enumerate(self._records(findings), 1):
            has_new = not fields.keys() <= keys.keys()
            keys.update(dict.fromkeys(fields))
            if seen == PROBED or (seen > PROBED and has_new):
                try:
                    return set(keys), resolve(list(keys), columns)
                except TraceError:
                    continue  # a later record may have a loss
        if not seen:
            first = f": {findings.problems[0]}" if findings.problems else ""
            raise TraceError(f"it has no record that could be read{first}")
        return set(keys), resolve(list(keys), columns)

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """See `LogReader`."""
        signal_keys, skipped = dict(self._signal_keys), 0
        records = self._trimmed_records(findings, signal_keys)
        while chunk := list(itertools.islice(records, CHUNK)):
            lines, fields = zip(*chunk, strict=True)
            cells = {name: [each.get(key) for each in fields] for name, key in signal_keys.items()}
            is_row = np.zeros(len(chunk), bool)
            for name, column in cells.items():
                if name != STEP:
                    is_row |= np.array([cell is not None for cell in column])
            labels = {name: f"'{key}'" for name, key in signal_keys.items()}
            skipped += int(np.count_nonzero(~is_row))
            yield parse_rows(self.path, cells, labels, is_row, findings, line=lines)
        if skipped and not self._tags:
            names = ", ".join(name for name in signal_keys if name != STEP)
            text = f"{skipped:,} record{'s' if skipped > 1 else ''} without {names}: skipped"
            findings.note(self.path, None, text)

    def _trimmed_records(
        self, findings: Findings, signal_keys: dict[str, str]
    ) -> Iterator[tuple[int, Fields]]:
        """Yields records, large ones without unused fields; adds late keys to `signal_keys`."""
        known = set(self._known_keys)
        for line, fields in self._records(findings):
            if not fields.keys() <= known:
                self._add_late_keys(fields, known, signal_keys)
            if len(fields) > _MAX_FIELDS:
                fields = {key: fields[key] for key in signal_keys.values() if key in fields}
            yield line, fields

    def _add_late_keys(self, fields: Fields, known: set[str], signal_keys: dict[str, str]) -> None:
        """Adds new keys of a record after the probed records, for signals without a key."""
        new = [key for key in fields if key not in known]
        known.update(new)
        try:
            # `resolve` needs a loss; the key of the loss is already chosen.
            found, _ = resolve([*new, "loss"], {})
        except TraceError:
            return
        for name, key in found.items():
            if name != STEP and key in new:
                signal_keys.setdefault(name, key)
