"""Reads files of records (JSON Lines, JSON documents), and makes rows from any records."""

from __future__ import annotations

import functools
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.tools.traces.names import STEP, resolve
from healcore.tools.traces.text import (
    BROKEN,
    excerpt,
    numbered_lines,
    open_text,
    parsed_rows,
    why_broken,
)
from healcore.tools.traces.trace import CHUNK, Findings, Rows, TraceError

Fields = dict[str, Any]
"""A record: names and numbers, or other JSON values."""

Records = Callable[[Findings], Iterator[tuple[int, Fields]]]
"""Begins a pass over the records of a file: line (0: the format has none) and fields."""

PROBED = 1000
"""Number of records whose keys decide what is read; later keys can only add signals."""

_WIDE = 256
"""Fields of a record above which only those that are read are kept."""
_LONGEST = 1 << 24
"""Characters of the longest record that is read, which limits the memory."""
_LONG = 1 << 12
"""Characters of a record above which it is shortened."""
_SMALL = frozenset((float, int, bool, type(None)))
_KEPT = 400
"""Characters that are kept of a text; a number written as text has fewer."""
_BLOCK = 1 << 16
LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_LIST = re.compile(r"\s*\[")
_GAP = re.compile(r"[\s,]*")


# -- files of JSON ---------------------------------------------------------------------------------


def json_lines(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Every object of a file with one per line, and its line. Damaged lines are ignored."""
    decode = json.JSONDecoder().raw_decode
    with open_text(path) as file:
        for number, line in numbered_lines(path, file, findings, longest=_LONGEST):
            text = line.strip()
            if not text:
                continue
            try:
                value, end = decode(text)
            except (ValueError, RecursionError):
                torn = "" if line.endswith(("\n", "\r")) else " (the last line is torn)"
                findings.problem(path, number, f"not JSON{torn}: {excerpt(text)}: left out")
                continue
            if end != len(text) or not isinstance(value, dict):
                what = "more than one JSON value" if end != len(text) else "not a JSON object"
                findings.problem(path, number, f"{what}: {excerpt(text)}: left out")
                continue
            yield number, value if len(text) < _LONG else _shortened(value)


def _shortened(record: Fields, *, nested: bool = False) -> Fields:
    """A long record without lists and deeper nesting, which no reader reads.

    Thousands of records are in memory at a time, and a list of lists takes twenty times its text.
    """
    short: Fields = {}
    for key, value in record.items():
        if type(value) is dict and not nested:
            short[key] = _shortened(value, nested=True)
        elif type(value) in _SMALL:
            short[key] = value
        else:
            short[key] = value[:_KEPT] if type(value) is str else f"a {type(value).__name__}"
    return short


def json_document(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Every record of one large JSON document, and its line. Damage ends the reading.

    The records are a list, or "log_history" in an object (`trainer_state.json` of Hugging Face's
    Trainer). json parses them one by one out of a window, so that the document is never in memory.
    ijson does the same, but stops at the first damage, and would be a dependency of every
    installation for one format.
    """
    decode = json.JSONDecoder().raw_decode
    text, line, opened = "", 1, False
    with open_text(path) as file:
        try:
            # The window is at least doubled, so that a long record takes linear time.
            while len(text) < _LONGEST and (block := file.read(max(_BLOCK, len(text)))):
                begins, text = not text, text + block
                at = counted = 0
                if not opened:
                    found = (begins and _LIST.match(text)) or LOG_HISTORY.search(text)
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
                        yield line, value if end - start < _LONG else _shortened(value)
                    else:
                        problem = f"not a record: {excerpt(str(value))}: left out"
                        findings.problem(path, line, problem)
                line += text.count("\n", counted, at)
                text = text[at:]
        except BROKEN as error:
            findings.problem(path, line, why_broken(error))
            return
    if opened:
        rest = excerpt(text) if text else "the end of the file"
        findings.problem(path, line, f"the document breaks off at {rest}: what follows is lost")


# -- formats -------------------------------------------------------------------------------------


class RecordFormat(NamedTuple):
    """One way of writing steps as JSON objects."""

    name: str
    recognizes: Callable[[Fields], bool]
    """Whether a record proves that a JSON Lines file has this format."""
    fields: Callable[[Fields], Fields | None]
    """The numbers of a record, or None for a record that is not a step."""
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


def open_records(path: str, form: RecordFormat, columns: Mapping[str, str]) -> list[RecordReader]:
    """The logs in a file of records; one for each optimizer of healcore's own metrics."""
    read = json_document if form is DOCUMENT else json_lines

    def steps_of(engine: str | None, findings: Findings) -> Iterator[tuple[int, Fields]]:
        steps = _steps(read(path, findings), form, path, findings)
        return steps if engine is None else (s for s in steps if s[1].get("engine") == engine)

    engines: list[str | None] = []
    if form is METRICS:
        first = itertools.islice(json_lines(path, Findings()), PROBED)
        engines += dict.fromkeys(str(each["engine"]) for _, each in first if "engine" in each)
    if len(engines) < 2:
        engines = [None]
    return [
        RecordReader(path, functools.partial(steps_of, each), columns, run=each, note=form.note)
        for each in engines
    ]


def _steps(
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


# -- rows ------------------------------------------------------------------------------------------


class RecordReader:
    """One file of records; the constructor reads the first ones to choose the keys.

    `run` is the optimizer, if the file has several. With `tags` every record is one number,
    mostly of a tag that is not read, and no note counts those. Raises TraceError if no record has a
    loss or a gradient norm, or two keys may be it.
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
        self._keys, (self._picks, notes) = self._look(columns)
        self.notes = [*notes, *([note] if note else [])]

    def _look(
        self, columns: Mapping[str, str]
    ) -> tuple[set[str], tuple[dict[str, str], list[str]]]:
        keys: dict[str, None] = {}  # a set that keeps the order of the file
        findings = Findings()
        seen = 0
        for seen, (_, fields) in enumerate(self._records(findings), 1):
            fresh = not fields.keys() <= keys.keys()
            keys.update(dict.fromkeys(fields))
            if seen == PROBED or (seen > PROBED and fresh):
                try:
                    return set(keys), resolve(list(keys), columns)
                except TraceError:
                    continue  # a later record may be the first with a loss
        if not seen:
            first = f": {findings.problems[0]}" if findings.problems else ""
            raise TraceError(f"it has no record that could be read{first}")
        return set(keys), resolve(list(keys), columns)

    def chunks(self, findings: Findings) -> Iterator[Rows]:
        """See `LogReader`."""
        known, picks = set(self._keys), dict(self._picks)
        ignored = 0
        lines: list[int] = []
        chunk: list[Fields] = []
        for line, fields in self._records(findings):
            if not fields.keys() <= known:
                self._add_late(fields, known, picks)
            if len(fields) > _WIDE:
                fields = {key: fields[key] for key in picks.values() if key in fields}
            lines.append(line)
            chunk.append(fields)
            if len(chunk) == CHUNK:
                rows, count = self._rows(chunk, lines, picks, findings)
                ignored += count
                yield rows
                lines, chunk = [], []
        if chunk:
            rows, count = self._rows(chunk, lines, picks, findings)
            ignored += count
            yield rows
        if ignored and not self._tags:
            names = ", ".join(name for name in picks if name != STEP)
            text = f"{ignored:,} record{'s' if ignored > 1 else ''} with none of {names}: ignored"
            findings.note(self.path, None, text)

    def _rows(
        self,
        chunk: Sequence[Fields],
        lines: Sequence[int],
        picks: Mapping[str, str],
        findings: Findings,
    ) -> tuple[Rows, int]:
        """The rows, and how many records have none of the signals."""
        cells = {name: [fields.get(key) for fields in chunk] for name, key in picks.items()}
        logs = np.zeros(len(chunk), bool)
        for name, column in cells.items():
            if name != STEP:
                logs |= np.array([cell is not None for cell in column])
        labels = {name: f"'{key}'" for name, key in picks.items()}
        rows = parsed_rows(self.path, cells, labels, logs, findings, line=lines)
        return rows, int(np.count_nonzero(~logs))

    def _add_late(self, fields: Fields, known: set[str], picks: dict[str, str]) -> None:
        """Takes a key that comes after the probed records, for a signal that has none yet."""
        new = [key for key in fields if key not in known]
        known.update(new)
        try:
            # "loss" lets `resolve` accept a single new key; its own key is already chosen.
            found, _ = resolve([*new, "loss"], {})
        except TraceError:
            return
        for name, key in found.items():
            if name != STEP and key in new:
                picks.setdefault(name, key)
