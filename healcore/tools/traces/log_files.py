"""Opens paths as traces: finds the files that are the log of one run, and their order."""

from __future__ import annotations

import functools
import json
import os
import re
import stat
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from healcore.tools.traces import tensorboard_file
from healcore.tools.traces.csv_file import TableReader, open_tables, read_header
from healcore.tools.traces.merged_rows import LogReader, merge_rows
from healcore.tools.traces.names import check_columns, quoted
from healcore.tools.traces.record_files import (
    DOCUMENT,
    EVENTS,
    LOG_HISTORY,
    METRICS,
    PLAIN,
    TYPED,
    Fields,
    RecordReader,
    open_records,
)
from healcore.tools.traces.text import encoding_of, head
from healcore.tools.traces.trace import (
    JUDGED,
    Findings,
    Rows,
    Trace,
    TraceError,
    TraceFinding,
    Unreadable,
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

_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_STATE = "trainer_state.json"
_ONE_RUN_EACH = frozenset({TABLE, DOCUMENT.name, PLAIN.name})
"""Formats of which several files in a directory are several runs."""


class NoLog(TraceError):
    """A directory without a file of a known format."""


def open_traces(
    paths: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    join: bool = False,
) -> tuple[list[Trace], list[Unreadable]]:
    """Opens the logs of runs.

    Args:
        paths: files, or directories. Files of a directory that continue each other, in the order of
            their names, are one run; a file that begins again is a run of its own. A directory
            without a log is searched for directories with logs.
        columns: signal (or "step") -> its name in the files, if that is not a known one.
        join: all paths are attempts of one run, in this order.

    Returns:
        The traces in the order of the paths, and the paths without a readable trace.

    Raises:
        TraceError: `columns` names something that is not a signal.
    """
    opener = _Opener(columns or {})
    check_columns(opener.columns)
    traces: list[Trace] = []
    parts: list[LogReader] = []
    findings = Findings()
    names = list(map(os.fspath, paths))
    for path in names:
        try:
            if join:
                parts += opener.one_run(path, findings)
            elif os.path.isdir(path):
                traces += opener.directory(path)
            else:
                traces += opener.file(path)
        except Exception as error:  # damaged bytes raise any error; other paths may be readable
            opener.failed.append(Unreadable(path, _reason(error)))
    if parts:
        traces.append(_trace(_with_more(names[0], len(names) - 1), parts, findings))
    return traces, opener.failed


def _reason(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"


def _with_more(name: str, others: int) -> str:
    return f"{name} (+{others})" if others else name


def _trace(name: str, readers: Sequence[LogReader], opening: Findings) -> Trace:
    def begin(findings: Findings) -> Iterator[Rows]:
        try:
            yield from merge_rows(readers, findings)
        except OSError as error:
            where = error.filename or readers[0].path
            raise TraceError(f"{where} cannot be read: {error.strerror or error}") from error

    return Trace(name, [each.path for each in readers], begin, opening)


class _Opener:
    """Opens paths with the options of one `open_traces`, and collects the unreadable paths."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self.failed: list[Unreadable] = []
        self._seen: set[tuple[int, int]] = set()

    # -- runs --------------------------------------------------------------------------------------

    def file(self, path: str) -> list[Trace]:
        """The runs of one file. The first usable run gets the notes about unusable runs."""
        traces: list[Trace] = []
        opening: list[Findings] = []
        reasons: list[str] = []
        for reader in self._readers(path):
            run = reader.run
            try:
                _check_usable(reader)
            except TraceError as error:
                reasons += [*reader.notes, str(error) if run is None else f"run '{run}': {error}"]
                continue
            opening.append(Findings())
            for note in reader.notes:
                opening[-1].note(path, None, note)
            traces.append(_trace(path if run is None else f"{path}#{run}", [reader], opening[-1]))
        if not traces:
            raise TraceError(reasons[-1])
        for reason in reasons:
            opening[0].note(path, None, reason)
        return traces

    def directory(self, path: str) -> list[Trace]:
        """The runs of a directory, or of its directories if it has no usable file.

        A directory that links reach again is read once.
        """
        place = os.stat(path)
        if (place.st_dev, place.st_ino) in self._seen:
            raise NoLog("it has been read already, under another name")
        self._seen.add((place.st_dev, place.st_ino))
        findings = Findings()
        folders = _folders(path)
        try:
            runs = _split_runs(self.one_run(path, findings))
        except TraceError:
            traces: list[Trace] = []
            for folder in folders:
                try:
                    traces += self.directory(folder)
                except NoLog:
                    continue  # most directories of a run hold weights or pictures
                except (TraceError, OSError) as error:
                    self.failed.append(Unreadable(folder, _reason(error)))
            if not traces:
                raise
            return traces
        if folders:
            names = quoted([os.path.basename(folder) for folder in folders])
            findings.note(path, None, f"{names}: not searched, because there are logs next to them")
        if len(runs) == 1:
            return [_trace(path, runs[0], findings)]
        return [
            _trace(_with_more(run[0].path, len(run) - 1), run, Findings() if at else findings)
            for at, run in enumerate(runs)
        ]

    def one_run(self, path: str, findings: Findings) -> list[LogReader]:
        """The readers of a file or a directory that is (part of) one run."""
        if not os.path.isdir(path):
            found = self._readers(path)
            if len(found) > 1:
                runs = quoted([str(reader.run) for reader in found])
                raise TraceError(f"it holds several runs ({runs}), which are not attempts of one")
            _check_usable(found[0])
            for note in found[0].notes:
                findings.note(path, None, note)
            return list(found)
        readers: list[LogReader] = []
        reasons: list[TraceFinding] = []
        for file in self._members(path, findings):
            try:
                readers += self.one_run(file, findings)
            except (TraceError, OSError) as error:
                reasons.append(TraceFinding(file, None, _reason(error)))
        if not readers:
            raise TraceError("; ".join(map(str, reasons)) or "it holds no file of a known format")
        for reason in reasons:
            findings.problem(*reason)
        return readers

    def _members(self, path: str, findings: Findings) -> list[str]:
        """The files of a directory that are read: of one format, in natural order of their names.

        log-2 comes before log-10; TensorBoard's names contain the time. Files that are not read get
        a note. The Trainer writes a log, complete up to there, into every checkpoint: the newest is
        read if there is none next to them. Raises TraceError if no file is of a known format.
        """
        by_format: dict[str, list[str]] = {}
        unknown: list[str] = []
        for name in sorted(os.listdir(path), key=_natural):
            file = os.path.join(path, name)
            if name.startswith(".") or not os.path.isfile(file):
                continue
            try:
                by_format.setdefault(format_of(head(file)), []).append(file)
            except OSError as error:
                self.failed.append(Unreadable(file, _reason(error)))
            except TraceError:
                unknown.append(name)  # often weights and configurations
        read = next((each for each in PREFERRED if each in by_format), None)
        if read is None:
            states = [
                (int(found[1]), os.path.join(path, name, _STATE))
                for name in os.listdir(path)
                if (found := _CHECKPOINT.match(name))
                and os.path.isfile(os.path.join(path, name, _STATE))
            ]
            if states:
                return [max(states)[1]]
            raise NoLog("it is a directory without a file of a known format. Name the files")
        for other, files in by_format.items():
            if other != read:
                names = quoted([os.path.basename(file) for file in files])
                findings.note(path, None, f"{names} ({other}): not read, the {read} are")
        if unknown:
            findings.note(path, None, f"{quoted(unknown)}: not read, of no known format")
        return by_format[read]

    def _readers(self, path: str) -> Sequence[LogReader]:
        """The logs in one file; more than one for an export of several runs.

        Raises TraceError, or OSError if it cannot be read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TraceError("it is a pipe or a device, and a log is read twice: save it to a file")
        kind = format_of(head(path))
        if kind == TENSORBOARD:
            tensorboard_file.check_readable(path)
            scalars = functools.partial(tensorboard_file.scalars, path)
            return [RecordReader(path, scalars, self.columns, tags=True)]
        if kind != TABLE:
            return open_records(path, RECORD_FORMATS[kind], self.columns)
        header = read_header(path)
        if len(header.names) == 1 and not self.columns and header.names[0].lower() != "loss":
            raise TraceError(f"its first line is '{header.names[0][:60]}'. It is not {KNOWN}")
        return open_tables(path, header, self.columns)


def _check_usable(reader: LogReader) -> None:
    """Reads up to the first row that can be judged; TraceError if there is none."""
    findings = Findings()
    rows = 0
    for chunk in reader.chunks(findings):
        rows += len(chunk.line)
        if any(chunk.given[name].any() for name in JUDGED & chunk.given.keys()):
            return
    if not findings.problem_count:
        none = "it has no rows" if isinstance(reader, TableReader) else "nothing is logged in it"
        why = f"none of its {rows:,} rows logs a loss or a gradient norm" if rows else none
        raise TraceError(f"no usable row: {why}")
    first = findings.problems[0]
    place = "" if first.line is None else f"line {first.line}: "
    count = findings.problem_count
    plural = f"{count:,} problems, the first: " if count > 1 else ""
    raise TraceError(f"no usable row: {plural}{place}{first.text}")


# -- formats -------------------------------------------------------------------------------------


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


# -- directories -----------------------------------------------------------------------------------


def _folders(path: str) -> list[str]:
    """The directories in a directory, without the Trainer's checkpoints, in natural order."""
    names = sorted(os.listdir(path), key=_natural)
    found = (
        os.path.join(path, name)
        for name in names
        if not name.startswith(".") and not _CHECKPOINT.match(name)
    )
    return [folder for folder in found if os.path.isdir(folder)]


def _split_runs(readers: Sequence[LogReader]) -> list[list[LogReader]]:
    """Divides the files of one directory into runs.

    The files of TensorBoard, of typed records and of healcore are one run per directory by
    convention. Tables, JSON Lines and JSON documents are different runs. Exception: names that
    differ in a number only (log-1, log-2), where each file begins after the first step of the file
    before.
    """
    runs: list[list[LogReader]] = []
    before: tuple[str, float | None] = ("", None)
    for reader in readers:
        name = re.sub(r"\d+", "#", os.path.basename(reader.path))
        first = _first_step(reader)
        same, began = before
        continues = name == same and first is not None and began is not None and first > began
        if runs and (continues or format_of(head(reader.path)) not in _ONE_RUN_EACH):
            runs[-1].append(reader)
        else:
            runs.append([reader])
        before = name, first
    return runs


def _first_step(reader: LogReader) -> float | None:
    """The first step, or None for a file without steps."""
    chunk = next((each for each in reader.chunks(Findings()) if len(each.line)), None)
    return None if chunk is None or np.isnan(chunk.step[0]) else float(chunk.step[0])


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
