"""Opens paths as traces: groups files by run, and orders the files of a run."""

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
from healcore.tools.traces.names import check_columns, quote_names
from healcore.tools.traces.record_files import (
    CONSOLE,
    DOCUMENT,
    EVENTS,
    LOG_HISTORY,
    METRICS,
    PLAIN,
    TYPED,
    Fields,
    RecordReader,
    open_records,
    printed_record,
)
from healcore.tools.traces.text import detect_encoding, read_head
from healcore.tools.traces.trace import (
    JUDGED,
    Findings,
    Rows,
    Trace,
    TraceError,
    TraceFinding,
    Unreadable,
)

RECORD_FORMATS = {form.name: form for form in (EVENTS, METRICS, TYPED, PLAIN, DOCUMENT, CONSOLE)}
"""Formats by name, in the order in which they are tried on the first records."""

TENSORBOARD = "TensorBoard events"
TABLE = "CSV"

PREFERRED = (METRICS.name, TYPED.name, DOCUMENT.name, TABLE, PLAIN.name, TENSORBOARD)
PREFERRED += (EVENTS.name, CONSOLE.name)
"""Formats by preference. If a directory has several formats, only the first of these is read."""

KNOWN = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, the console "
    "output of a Trainer, a TensorBoard event file, or healcore's own metrics or events"
)

_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_TRAINER_STATE = "trainer_state.json"
_ONE_RUN_PER_FILE = frozenset({TABLE, DOCUMENT.name, PLAIN.name, CONSOLE.name})
"""Formats in which each file of a directory is a separate run."""


class NoLog(TraceError):
    """A directory contains no file of a known format."""


def open_traces(
    paths: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    join: bool = False,
) -> tuple[list[Trace], list[Unreadable]]:
    """Opens the logs of runs.

    Args:
        paths: files or directories. Files of a directory are one run if they continue each other in
            the order of their names; a file that begins again is a separate run. If a directory has
            no log, its subdirectories are searched.
        columns: names in the files by signal or "step", for names that are not known.
        join: whether all paths are attempts of one run, in this order.

    Returns:
        The traces in the order of the paths, and the paths without a usable trace.

    Raises:
        TraceError: a key of `columns` is not a signal.
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
        except Exception as error:  # damaged bytes may raise any error
            opener.failed.append(Unreadable(path, _reason(error)))
    if parts:
        traces.append(_make_trace(_with_count(names[0], len(names) - 1), parts, findings))
    return traces, opener.failed


def _reason(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"


def _with_count(name: str, others: int) -> str:
    return f"{name} (+{others})" if others else name


def _make_trace(name: str, readers: Sequence[LogReader], opening: Findings) -> Trace:
    def begin(findings: Findings) -> Iterator[Rows]:
        try:
            yield from merge_rows(readers, findings)
        except OSError as error:
            where = error.filename or readers[0].path
            raise TraceError(f"{where} cannot be read: {error.strerror or error}") from error

    return Trace(name, [reader.path for reader in readers], begin, opening)


class _Opener:
    """Opens the paths of one call of `open_traces`, and collects the unreadable paths."""

    def __init__(self, columns: Mapping[str, str]) -> None:
        self.columns = columns
        self.failed: list[Unreadable] = []
        self._seen: set[tuple[int, int]] = set()

    # -- runs --------------------------------------------------------------------------------------

    def file(self, path: str) -> list[Trace]:
        """Opens the runs of one file. The first usable run gets the notes about unusable runs."""
        traces: list[Trace] = []
        findings: list[Findings] = []
        reasons: list[str] = []
        for reader in self._readers(path):
            run = reader.run
            try:
                _check_usable(reader)
            except TraceError as error:
                reasons += [*reader.notes, str(error) if run is None else f"run '{run}': {error}"]
                continue
            findings.append(Findings())
            for note in reader.notes:
                findings[-1].note(path, None, note)
            name = path if run is None else f"{path}#{run}"
            traces.append(_make_trace(name, [reader], findings[-1]))
        if not traces:
            raise TraceError(reasons[-1])
        for reason in reasons:
            findings[0].note(path, None, reason)
        return traces

    def directory(self, path: str) -> list[Trace]:
        """Opens the runs of a directory, or of its subdirectories if it has no usable file.

        A directory that links reach several times is read once.
        """
        status = os.stat(path)
        if (status.st_dev, status.st_ino) in self._seen:
            raise NoLog("it has been read already, under another name")
        self._seen.add((status.st_dev, status.st_ino))
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
                    continue  # many directories contain only weights or pictures
                except (TraceError, OSError) as error:
                    self.failed.append(Unreadable(folder, _reason(error)))
            if not traces:
                raise
            return traces
        if folders:
            names = quote_names([os.path.basename(folder) for folder in folders])
            findings.note(path, None, f"{names}: not searched, because the directory has logs")
        if len(runs) == 1:
            return [_make_trace(path, runs[0], findings)]
        return [
            _make_trace(_with_count(run[0].path, len(run) - 1), run, Findings() if at else findings)
            for at, run in enumerate(runs)
        ]

    def one_run(self, path: str, findings: Findings) -> list[LogReader]:
        """Returns the readers of a file or a directory that belongs to one run."""
        readers: list[LogReader] = []
        if not os.path.isdir(path):
            readers += self._readers(path)
            if len(readers) > 1:
                runs = quote_names([str(reader.run) for reader in readers])
                raise TraceError(f"it has several runs ({runs}), which are not attempts of one run")
            _check_usable(readers[0])
            for note in readers[0].notes:
                findings.note(path, None, note)
            return readers
        reasons: list[TraceFinding] = []
        for file in self._members(path, findings):
            try:
                readers += self.one_run(file, findings)
            except (TraceError, OSError) as error:
                reasons.append(TraceFinding(file, None, _reason(error)))
        if not readers:
            raise TraceError(
                "; ".join(map(str, reasons)) or "it contains no file of a known format"
            )
        for reason in reasons:
            findings.problem(*reason)
        return readers

    def _members(self, path: str, findings: Findings) -> list[str]:
        """Returns the files of the preferred format, in natural order: log-2 precedes log-10.

        Adds a note for files that are not read. Without a log in the directory, the log in the
        newest checkpoint of the Hugging Face Trainer is read, which is complete up to that step.
        Raises TraceError if no file has a known format.
        """
        by_format: dict[str, list[str]] = {}
        unknown: list[str] = []
        for name in sorted(os.listdir(path), key=_natural):
            file = os.path.join(path, name)
            if name.startswith(".") or not os.path.isfile(file):
                continue
            try:
                by_format.setdefault(detect_format(read_head(file)), []).append(file)
            except OSError as error:
                self.failed.append(Unreadable(file, _reason(error)))
            except TraceError:
                unknown.append(name)  # often weights and configurations
        preferred = next((name for name in PREFERRED if name in by_format), None)
        if preferred is None:
            states = [
                (int(match[1]), os.path.join(path, name, _TRAINER_STATE))
                for name in os.listdir(path)
                if (match := _CHECKPOINT.match(name))
                and os.path.isfile(os.path.join(path, name, _TRAINER_STATE))
            ]
            if states:
                return [max(states)[1]]
            raise NoLog("it is a directory without a file of a known format. Pass the files")
        for other, files in by_format.items():
            if other != preferred:
                names = quote_names([os.path.basename(file) for file in files])
                findings.note(
                    path,
                    None,
                    f"{names} ({other}): not read, only {preferred}",
                )
        if unknown:
            findings.note(path, None, f"{quote_names(unknown)}: not read, unknown format")
        return by_format[preferred]

    def _readers(self, path: str) -> Sequence[LogReader]:
        """Opens the logs in one file: several logs for an export of several runs.

        Raises TraceError, or OSError if the file cannot be read.
        """
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise TraceError("it is a pipe or a device, but a log is read twice: save it to a file")
        kind = detect_format(read_head(path))
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
    """Reads up to the first row that can be judged. Raises TraceError if no row can be."""
    findings = Findings()
    rows = 0
    for chunk in reader.chunks(findings):
        rows += len(chunk.line)
        if any(chunk.logged[name].any() for name in JUDGED & chunk.logged.keys()):
            return
    if not findings.problem_count:
        empty = "it has no rows" if isinstance(reader, TableReader) else "it logs no values"
        why = f"none of its {rows:,} rows logs a loss or a gradient norm" if rows else empty
        raise TraceError(f"no usable row: {why}")
    first = findings.problems[0]
    place = "" if first.line is None else f"line {first.line}: "
    count = findings.problem_count
    plural = f"{count:,} problems, the first: " if count > 1 else ""
    raise TraceError(f"no usable row: {plural}{place}{first.text}")


# -- formats -------------------------------------------------------------------------------------


def detect_format(start: bytes) -> str:
    """Detects the format by the first megabyte. Raises TraceError for an unknown format."""
    if not start.strip():
        raise TraceError("it is empty")
    if b"brain.Event:" in start[:64]:
        return TENSORBOARD
    text = start.decode(detect_encoding(start), errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary, and not {KNOWN}")
    if text.startswith("[") or LOG_HISTORY.search(text):
        return DOCUMENT.name
    records = _first_records(text)
    if records:
        return next(
            name for name, form in RECORD_FORMATS.items() if any(map(form.recognizes, records))
        )
    if any(printed_record(line) is not None for line in text.splitlines()):
        return CONSOLE.name
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
    """Lists subdirectories in natural order, without the checkpoints of the Trainer."""
    names = sorted(os.listdir(path), key=_natural)
    paths = (
        os.path.join(path, name)
        for name in names
        if not name.startswith(".") and not _CHECKPOINT.match(name)
    )
    return [folder for folder in paths if os.path.isdir(folder)]


def _split_runs(readers: Sequence[LogReader]) -> list[list[LogReader]]:
    """Divides the files of one directory into runs.

    TensorBoard files, typed records and healcore files in one directory are one run by convention.
    Each table, JSON Lines file or JSON document is a separate run. Exception: files are one run if
    their names differ only in a number (log-1, log-2) and each file begins after the first step of
    the previous file.
    """
    runs: list[list[LogReader]] = []
    previous: tuple[str, float | None] = ("", None)
    for reader in readers:
        name = re.sub(r"\d+", "#", os.path.basename(reader.path))
        first = _first_step(reader)
        other, start = previous
        continues = name == other and first is not None and start is not None and first > start
        if runs and (continues or detect_format(read_head(reader.path)) not in _ONE_RUN_PER_FILE):
            runs[-1].append(reader)
        else:
            runs.append([reader])
        previous = name, first
    return runs


def _first_step(reader: LogReader) -> float | None:
    """Returns the first step, or None for a file without steps."""
    chunk = next((rows for rows in reader.chunks(Findings()) if len(rows.line)), None)
    return None if chunk is None or np.isnan(chunk.step[0]) else float(chunk.step[0])


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]
