"""Reads paths as traces: detects formats, groups files by run, and orders the files of a run."""

from __future__ import annotations

import functools
import json
import os
import re
from collections.abc import Mapping, Sequence
from typing import Any

from healcore.tools.traces import tensorboard_file
from healcore.tools.traces.attempts import Log, join_logs
from healcore.tools.traces.columns import JUDGED, Trace, TraceError, Unreadable
from healcore.tools.traces.names import check_columns, quote_names
from healcore.tools.traces.records import (
    CONSOLE,
    DOCUMENT,
    LOG_HISTORY,
    PLAIN,
    TYPED,
    printed_record,
    read_records,
    rows_of_records,
)
from healcore.tools.traces.tables import read_header, read_tables
from healcore.tools.traces.text import read_head

TENSORBOARD = "TensorBoard events"
TABLE = "CSV"

PREFERRED = (TYPED.name, DOCUMENT.name, TABLE, PLAIN.name, TENSORBOARD, CONSOLE.name)
"""Formats by preference. If a directory has several formats, only the first of these is read."""

KNOWN = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, the console "
    "output of a Trainer, a TensorBoard event file, or healcore's own metrics"
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
    names = list(map(os.fspath, paths))
    for path in names:
        try:
            logs = (
                _logs_of_directory(path, columns) if os.path.isdir(path) else _logs(path, columns)
            )
            if join:
                parts += _one_run(logs)
            else:
                traces += _split_runs(path, logs)
        except Exception as error:  # damaged bytes may raise any error
            failed.append(Unreadable(path, _reason(error)))
    if parts:
        others = f" (+{len(names) - 1})" if len(names) > 1 else ""
        try:
            traces.append(join_logs(names[0] + others, parts))
        except TraceError as error:
            failed.append(Unreadable(names[0], str(error)))
    return traces, failed


def _reason(error: Exception) -> str:
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"


# -- runs ------------------------------------------------------------------------------------------


def _one_run(logs: Sequence[Log]) -> Sequence[Log]:
    """Raises TraceError if a file has several runs."""
    runs = [str(log.run) for log in logs if log.run is not None]
    if runs:
        raise TraceError(
            f"it has several runs ({quote_names(runs)}), which are not attempts of one run"
        )
    return logs


def _split_runs(path: str, logs: Sequence[Log]) -> list[Trace]:
    """Divides the logs of a file or a directory into runs.

    TensorBoard files, typed records and healcore files in one directory are one run by convention.
    Each table, JSON Lines file or JSON document is a separate run.
    """
    one_run = detect_format(read_head(logs[0].path)) not in _ONE_RUN_PER_FILE
    if (len(logs) == 1 and logs[0].run is None) or (one_run and not any(log.run for log in logs)):
        return [join_logs(path, logs)]
    return [
        join_logs(log.path if log.run is None else f"{log.path}#{log.run}", [log]) for log in logs
    ]


def _logs_of_directory(path: str, columns: Mapping[str, str]) -> list[Log]:
    """Reads the files of the preferred format, in natural order: log-2 precedes log-10.

    Without a log in the directory, the log in the newest checkpoint of the Hugging Face Trainer is
    read, which is complete up to that step. Raises TraceError if no file is a usable log.
    """
    by_format: dict[str, list[str]] = {}
    states: list[tuple[int, str]] = []
    unusable: list[str] = []
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
            unusable.append(f"{file}: {_reason(error)}")
        except TraceError:
            continue  # often weights and configurations
    preferred = next((by_format[name] for name in PREFERRED if name in by_format), None)
    if preferred is None and not states:
        raise TraceError("it is a directory without a file of a known format. Pass the files")
    logs: list[Log] = []
    for file in preferred or [max(states)[1]]:
        try:
            logs += _logs(file, columns)
        except (TraceError, OSError) as error:
            unusable.append(f"{file}: {_reason(error)}")
    if not logs:
        raise TraceError("; ".join(unusable))
    logs[0].findings.problems += unusable
    logs[0].findings.problem_count += len(unusable)
    return logs


def _natural(name: str) -> list[tuple[int, str]]:
    return [
        (int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)
    ]


def _logs(path: str, columns: Mapping[str, str]) -> list[Log]:
    """Reads the usable logs in one file: several logs for an export of several runs.

    Raises TraceError, or OSError if the file cannot be read.
    """
    kind = detect_format(read_head(path))
    if kind == TENSORBOARD:
        tensorboard_file.check_installed()
        scalars = functools.partial(tensorboard_file.scalars, path)
        logs = [rows_of_records(path, scalars, columns)]
    elif kind == TABLE:
        header = read_header(path)
        if len(header.names) == 1 and not columns and header.names[0].lower() != "loss":
            raise TraceError(f"its first line is '{header.names[0][:60]}'. It is not {KNOWN}")
        logs = read_tables(path, header, columns)
    else:
        form = next(form for form in (TYPED, PLAIN, DOCUMENT, CONSOLE) if form.name == kind)
        logs = read_records(path, form, columns)
    usable = [
        log for log in logs if any(log.logged[name].any() for name in JUDGED if name in log.logged)
    ]
    if usable:
        return usable
    findings, rows = logs[-1].findings, len(logs[-1].line)
    if not findings.problems:
        why = f"none of its {rows:,} rows logs" if rows else "it does not log"
        raise TraceError(f"no usable row: {why} a loss or a gradient norm")
    raise TraceError(f"no usable row: {findings.problem_count:,} problems, {findings.problems[0]}")


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
    records = [record for line in text.splitlines()[:200] if (record := _parse(line)) is not None]
    if records:
        return (TYPED if any(map(TYPED.is_step, records)) else PLAIN).name
    if text.startswith("{"):
        raise TraceError(f"it is JSON, but has no 'log_history' and is not {KNOWN}")
    return TABLE


def _parse(line: str) -> dict[str, Any] | None:
    """Returns the JSON object in a line, or None."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
