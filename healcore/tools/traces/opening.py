"""Reads paths as traces: detects formats, groups files by run, and orders the files of a run."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence

from healcore.tools.traces import tensorboard_file
from healcore.tools.traces.attempts import Log, join_logs
from healcore.tools.traces.columns import (
    JUDGED,
    Findings,
    Trace,
    TraceError,
    TraceFinding,
    Unreadable,
)
from healcore.tools.traces.names import check_columns, quote_names
from healcore.tools.traces.records import (
    CONSOLE,
    DOCUMENT,
    EVENTS,
    LOG_HISTORY,
    METRICS,
    PLAIN,
    TYPED,
    Fields,
    printed_record,
    read_records,
    rows_of_records,
)
from healcore.tools.traces.tables import read_header, read_tables
from healcore.tools.traces.text import read_head

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


def open_traces(
    paths: Sequence[str],
    *,
    columns: Mapping[str, str] | None = None,
    join: bool = False,
) -> tuple[list[Trace], list[Unreadable]]:
    """Reads the logs of runs.

    Args:
        paths: files, or directories with the logs of a run.
        columns: names in the files by signal or "step", for names that are not known.
        join: whether all paths are attempts of one run, in this order.

    Returns:
        The traces in the order of the paths, and the paths without a usable trace.

    Raises:
        TraceError: a key of `columns` is not a signal.
    """
    columns = columns or {}
    check_columns(columns)
    traces: list[Trace] = []
    failed: list[Unreadable] = []
    parts: list[Log] = []
    opening = Findings()
    for path in map(os.fspath, paths):
        try:
            if join:
                parts += _one_run(path, columns, opening)
            elif os.path.isdir(path):
                traces += _directory(path, columns)
            else:
                traces += _file(path, columns)
        except Exception as error:  # damaged bytes may raise any error
            failed.append(Unreadable(path, _reason(error)))
    if parts:
        try:
            name, others = os.fspath(paths[0]), len(paths) - 1
            name = f"{name} (+{others})" if others else name
            traces.append(join_logs(name, parts, opening))
        except TraceError as error:
            failed.append(Unreadable(os.fspath(paths[0]), str(error)))
    return traces, failed


def _reason(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"


# -- runs ------------------------------------------------------------------------------------------


def _file(path: str, columns: Mapping[str, str]) -> list[Trace]:
    """Reads the runs of one file. The first usable run gets the notes about unusable runs."""
    usable: list[Log] = []
    reasons: list[str] = []
    for log in _logs(path, columns):
        try:
            _check_usable(log)
        except TraceError as error:
            reasons.append(str(error) if log.run is None else f"run '{log.run}': {error}")
            continue
        usable.append(log)
    if not usable:
        raise TraceError(reasons[-1])
    for reason in reasons:
        usable[0].findings.note(path, None, reason)
    return [
        join_logs(path if log.run is None else f"{path}#{log.run}", [log], Findings())
        for log in usable
    ]


def _directory(path: str, columns: Mapping[str, str]) -> list[Trace]:
    """Reads the runs of a directory.

    TensorBoard files, typed records and healcore files in one directory are one run by convention.
    Each table, JSON Lines file or JSON document is a separate run.
    """
    opening = Findings()
    logs = _one_run(path, columns, opening)
    if len(logs) == 1 or detect_format(read_head(logs[0].path)) not in _ONE_RUN_PER_FILE:
        return [join_logs(path, logs, opening)]
    return [
        join_logs(log.path, [log], Findings() if at else opening) for at, log in enumerate(logs)
    ]


def _one_run(path: str, columns: Mapping[str, str], opening: Findings) -> list[Log]:
    """Reads the logs of a file or a directory that belongs to one run."""
    if not os.path.isdir(path):
        logs = _logs(path, columns)
        if len(logs) > 1:
            runs = quote_names([str(log.run) for log in logs])
            raise TraceError(f"it has several runs ({runs}), which are not attempts of one run")
        _check_usable(logs[0])
        return logs
    found: list[Log] = []
    reasons: list[TraceFinding] = []
    for file in _members(path, opening):
        try:
            found += _one_run(file, columns, opening)
        except (TraceError, OSError) as error:
            reasons.append(TraceFinding(file, None, _reason(error)))
    if not found:
        raise TraceError("; ".join(map(str, reasons)))
    for reason in reasons:
        opening.problem(*reason)
    return found


def _members(path: str, opening: Findings) -> list[str]:
    """Returns the files of the preferred format, in natural order: log-2 precedes log-10.

    Adds a note for files of other formats, and a problem for unreadable files. Without a log in the
    directory, the log in the newest checkpoint of the Hugging Face Trainer is read, which is
    complete up to that step. Raises TraceError if no file has a known format.
    """
    by_format: dict[str, list[str]] = {}
    states: list[tuple[int, str]] = []
    for name in sorted(os.listdir(path), key=_natural):
        file = os.path.join(path, name)
        state = os.path.join(file, _TRAINER_STATE)
        if (match := _CHECKPOINT.match(name)) and os.path.isfile(state):
            states.append((int(match[1]), state))
        if name.startswith(".") or not os.path.isfile(file):
            continue
        try:
            by_format.setdefault(detect_format(read_head(file)), []).append(file)
        except OSError as error:
            opening.problem(file, None, _reason(error))
        except TraceError:
            continue  # often weights and configurations
    preferred = next((name for name in PREFERRED if name in by_format), None)
    if preferred is None:
        if states:
            return [max(states)[1]]
        raise TraceError("it is a directory without a file of a known format. Pass the files")
    for other, files in by_format.items():
        if other != preferred:
            names = quote_names([os.path.basename(file) for file in files])
            opening.note(path, None, f"{names} ({other}): not read, only {preferred}")
    return by_format[preferred]


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _logs(path: str, columns: Mapping[str, str]) -> list[Log]:
    """Reads the logs in one file: several logs for an export of several runs.

    Raises TraceError, or OSError if the file cannot be read.
    """
    kind = detect_format(read_head(path))
    if kind == TENSORBOARD:
        tensorboard_file.check_installed()
        scalars = functools.partial(tensorboard_file.scalars, path)
        return [rows_of_records(path, scalars, columns)]
    if kind != TABLE:
        return read_records(path, RECORD_FORMATS[kind], columns)
    header = read_header(path)
    if len(header.names) == 1 and not columns and header.names[0].lower() != "loss":
        raise TraceError(f"its first line is '{header.names[0][:60]}'. It is not {KNOWN}")
    return read_tables(path, header, columns)


def _check_usable(log: Log) -> None:
    """Raises TraceError if no row can be judged."""
    if any(log.logged[name].any() for name in JUDGED if name in log.logged):
        return
    findings, rows = log.findings, len(log.line)
    if not findings.problem_count:
        empty = "it logs no values" if log.index is None else "it has no rows"
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
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary, and not {KNOWN}")
    if any(printed_record(line) is not None for line in text.splitlines()):
        return CONSOLE.name
    if text.startswith("[") or LOG_HISTORY.search(text):
        return DOCUMENT.name
    records = _first_records(text)
    if records:
        return next(
            name for name, form in RECORD_FORMATS.items() if any(map(form.recognizes, records))
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
