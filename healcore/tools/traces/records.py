"""Files of records: which of them count, what their keys mean, and the rows out of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from healcore.tools.traces.batch import Batch
from healcore.tools.traces.cells import from_json
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.names import STEP, resolve
from healcore.tools.traces.trace import CHUNK, TraceError

Objects = Callable[[Findings], Iterator[tuple[int, dict[str, Any]]]]
"""Begins a pass over the records of a file: line (0: the format has none) and fields."""

PROBE = 1000
"""Records whose keys decide what is read; keys that come later can only add to it."""

_WIDE = 256
"""Fields of a record from which on only those are kept that are read."""


class RecordReader:
    """One file of records. Which record counts and what is in it is for `objects` to say."""

    def __init__(
        self,
        path: str,
        objects: Objects,
        columns: Mapping[str, str],
        extras: Sequence[str],
        *,
        tags: bool = False,
    ) -> None:
        """Looks at the first records.

        Args:
            path: the file.
            objects: its records.
            columns: signal -> key, as the user said.
            extras: keys that are read besides the signals.
            tags: every record is one number of many, most of which nobody asked for: those are
                no more worth a word than a table's other columns.

        Raises:
            TraceError: no record has a loss or a gradient norm, or two keys may be it.
        """
        self.path = path
        self._objects = objects
        self._asked = columns
        self._extras = extras
        self._tags = tags
        self._keys, self._picks, self.notes = self._look()

    def _look(self) -> tuple[set[str], dict[str, str], list[str]]:
        keys: dict[str, None] = {}  # a set that keeps the order of the file
        findings = Findings()
        seen = 0
        for seen, (_, fields) in enumerate(self._objects(findings), 1):
            fresh = not fields.keys() <= keys.keys()
            keys.update(dict.fromkeys(fields))
            if seen == PROBE or (seen > PROBE and fresh):
                try:
                    return set(keys), *resolve(list(keys), self._asked, self._extras)
                except TraceError:
                    continue  # the loss may be logged for the first time further on
        if not seen:
            first = f": {findings.problems[0]}" if findings.problems else ""
            raise TraceError(f"it has no record that could be read{first}")
        return set(keys), *resolve(list(keys), self._asked, self._extras)

    def batches(self, findings: Findings) -> Iterator[Batch]:
        """See `Reader`."""
        known, picks = set(self._keys), dict(self._picks)
        lines: list[int] = []
        chunk: list[Mapping[str, Any]] = []
        passed = 0
        for line, fields in self._objects(findings):
            if not fields.keys() <= known:
                self._late(fields, known, picks)
            lines.append(line)
            if len(fields) > _WIDE:
                fields = {key: fields[key] for key in picks.values() if key in fields}
            chunk.append(fields)
            if len(chunk) == CHUNK:
                batch = self._columns(chunk, lines, picks, findings)
                passed += len(chunk) - batch.end
                yield batch
                lines, chunk = [], []
        if chunk:
            batch = self._columns(chunk, lines, picks, findings)
            passed += len(chunk) - batch.end
            yield batch
        if passed and not self._tags:
            names = ", ".join(name for name in picks if name != STEP)
            text = f"{passed:,} record{'s' if passed > 1 else ''} with none of {names}: passed over"
            findings.note(self.path, None, text)

    def _columns(
        self,
        chunk: Sequence[Mapping[str, Any]],
        lines: Sequence[int],
        picks: Mapping[str, str],
        findings: Findings,
    ) -> Batch:
        """The rows out of some records; `end` is how many of them log something."""
        values: dict[str, np.ndarray] = {}
        given: dict[str, np.ndarray] = {}
        logs = np.zeros(len(chunk), bool)
        raw = {name: [fields.get(key) for fields in chunk] for name, key in picks.items()}
        for name, cells in raw.items():
            if name != STEP:
                logs |= np.array([cell is not None for cell in cells])
        for name, cells in raw.items():
            lost = "the row is left out" if name == STEP else f"the row is read without {name}"
            values[name], given[name] = self._numbers(
                cells, logs, lines, picks[name], lost, findings
            )
        keep, step = logs, None
        if STEP in picks:
            step, told = values.pop(STEP), given.pop(STEP)
            keep = logs & np.isfinite(step)
            for at in np.flatnonzero(logs & ~keep).tolist():
                if told[at] or raw[STEP][at] is None:
                    why = f"{step[at]}" if told[at] else "missing"
                    text = f"'{picks[STEP]}': {why}: the row is left out"
                    findings.problem(self.path, lines[at] or None, text)
            step = step[keep]
        with np.errstate(over="ignore"):  # 1e40 is an infinite float32, as it is in training
            values = {name: column[keep].astype(np.float32) for name, column in values.items()}
        return Batch(
            line=np.array(lines, np.int64)[keep],
            row=None,
            end=int(np.count_nonzero(logs)),
            step=step,
            values=values,
            given={name: flags[keep] for name, flags in given.items()},
        )

    def _numbers(
        self,
        cells: Sequence[Any],
        logs: np.ndarray,
        lines: Sequence[int],
        key: str,
        lost: str,
        findings: Findings,
    ) -> tuple[np.ndarray, np.ndarray]:
        """float64 (n,) and which of them are numbers."""
        kinds = set(map(type, cells))
        try:
            if kinds <= {float, int, type(None)}:  # not bool: true is no loss
                given = np.array([cell is not None for cell in cells])
                return np.array(cells, np.float64), given
        except OverflowError:  # a whole number beyond float64
            pass
        found, given = np.full(len(cells), np.nan), np.zeros(len(cells), bool)
        for at in np.flatnonzero(logs).tolist():
            try:
                number = from_json(cells[at])
            except ValueError as error:
                findings.problem(self.path, lines[at] or None, f"'{key}': {error}: {lost}")
                continue
            if number is not None:
                found[at], given[at] = number, True
        return found, given

    def _late(self, fields: Mapping[str, Any], known: set[str], picks: dict[str, str]) -> None:
        """Takes a key that comes up after the probe, for a signal that has none yet."""
        new = [key for key in fields if key not in known]
        known.update(new)
        try:
            # "loss" is there so that a lone new key resolves; it has been decided long ago.
            found, _ = resolve([*new, "loss"], {}, self._extras)
        except TraceError:
            return
        for name, key in found.items():
            if name != STEP and key in new:
                picks.setdefault(name, key)
