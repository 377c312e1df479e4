"""Reads files of records (JSON Lines, JSON documents), and makes rows from any records."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from healcore.tools.traces.formats import LOG_HISTORY, Fields
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

Records = Callable[[Findings], Iterator[tuple[int, Fields]]]
"""Begins a pass over the records of a file: line (0: the format has none) and fields."""

PROBED = 1000
"""Records whose keys decide what is read; keys of later records can only add to it."""

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
_LIST = re.compile(r"\s*\[")
_GAP = re.compile(r"[\s,]*")


# -- files of JSON ---------------------------------------------------------------------------------


def json_lines(path: str, findings: Findings) -> Iterator[tuple[int, Fields]]:
    """Every object of a file with one per line, and its line. Damaged lines are left out."""
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


# -- rows ------------------------------------------------------------------------------------------


class RecordReader:
    """One file of records; the constructor reads the first ones to choose the keys.

    `records` are those that are steps, see `formats.steps`. With `tags` every record is one number,
    mostly of a tag that is not read, and no note counts those. Raises TraceError if no record has a
    loss or a gradient norm, or two keys may be it.
    """

    def __init__(
        self,
        path: str,
        records: Records,
        columns: Mapping[str, str],
        *,
        tags: bool = False,
    ) -> None:
        self.path = path
        self.rows_read = 0
        self._records = records
        self._tags = tags
        self._keys, (self._picks, self.notes) = self._look(columns)

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
