"""Reads paths as traces: detects formats, groups files by run, and orders the files of a run."""

from __future__ import annotations

import codecs
import json
import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from healcore.console import counted
from healcore.tools.traces import formats, printed
from healcore.tools.traces.columns import (
    JUDGED_SIGNALS,
    KNOWN_FORMATS,
    RawLog,
    TraceError,
    UnjudgeableLog,
    read_head,
)
from healcore.tools.traces.names import KNOWN_COLUMNS, is_known, quote_names
from healcore.tools.traces.tables import read_tables
from healcore.tools.traces.trace import Trace, Unreadable, join_logs

_CHECKPOINT = re.compile(r"checkpoint-(\d+)$")
_SAVED_WEIGHTS = re.compile(r"^step-\d+|^checkpoint-\d+|\.(pt|pth|ckpt|safetensors|distcp)$")
"""Names of checkpoints, and of files with weights."""
_TRAINER_STATE = "trainer_state.json"
_NO_LOG = (".events.jsonl", ".lock", ".py", ".sh", ".md", ".ipynb", ".toml", ".yaml", ".yml")
"""Ends of the names of files that have no row for each step: a Healer's events, code, settings."""


def parse_columns(pairs: Sequence[str] | None) -> dict[str, str]:
    """Parses the values of the option `--column`.

    Args:
        pairs: texts such as "loss=train/ce", or None.

    Returns:
        Signal -> name of its column, for `open_traces`.

    Raises:
        TraceError: a text is not SIGNAL=NAME.
    """
    columns: dict[str, str] = {}
    for pair in pairs or ():
        signal, _, name = pair.partition("=")
        if not (signal and name):
            raise TraceError(f"--column must be SIGNAL=NAME, like loss=train/ce, got {pair!r}")
        columns[signal] = name
    return columns


def open_traces(
    paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    *,
    columns: Mapping[str, str] | None = None,
    join: bool = False,
) -> tuple[list[Trace], list[Unreadable]]:
    """Reads the logs of runs.

        traces, unreadable = open_traces(["run.csv", "logs/"])
        print([trace.name for trace in traces], [failure.problem for failure in unreadable])

    The format of each file is detected by its content. If one log cannot be read, the other logs
    are read nevertheless.

    Args:
        paths: a path or several, of files or of directories: of a run (such as a Healer's store),
            or of several runs with a folder each.
        columns: names in the files by signal or "step", for names that are not known.
        join: whether all paths are attempts of one run, in this order.

    Returns:
        The traces in the order of the paths, and the paths without a usable trace.

    Raises:
        TraceError: a key of `columns` is not a signal.
    """
    columns = columns or {}
    for signal in columns:
        if signal not in KNOWN_COLUMNS:
            raise TraceError(
                f"--column {signal}=...: '{signal}' is not a signal. Use one of "
                f"{', '.join(KNOWN_COLUMNS)}"
            )
    runs: list[tuple[str, list[RawLog]]] = []
    parts: list[RawLog] = []
    failed: list[Unreadable] = []
    if isinstance(paths, str | os.PathLike):
        paths = [paths]  # each letter would be a path, and "/" the whole disk
    names = [os.fspath(path) for path in paths]
    for path in names:
        try:
            for folder, logs, is_one_run in _read_path(path, columns, failed):
                several = [str(log.run) for log in logs if log.run is not None]
                if join and several:
                    some = quote_names(several)
                    raise TraceError(
                        f"it has several runs ({some}), which are not attempts of one run"
                    )
                if join:
                    parts += logs
                elif not several and (is_one_run or len(logs) == 1):
                    runs.append((folder, logs))
                else:
                    for log in logs:
                        name = log.path
                        if log.run:
                            name += f"#{log.run}"
                        runs.append((name, [log]))
        except Exception as error:  # damaged bytes may raise any error
            failed.append(Unreadable(path, _reason(error), isinstance(error, UnjudgeableLog)))
    if parts:
        name = names[0]
        if len(names) > 1:
            name += f" (+{len(names) - 1})"
        runs.append((name, parts))
    traces: list[Trace] = []
    for name, logs in runs:
        try:
            traces.append(join_logs(name, logs))
        except TraceError as error:
            failed.append(Unreadable(name, str(error), isinstance(error, UnjudgeableLog)))
    return traces, failed


def _reason(error: Exception) -> str:
    """Describes why a path could not be read."""
    if isinstance(error, TraceError):
        return str(error)
    if isinstance(error, OSError):
        return f"it cannot be read: {error.strerror or error}"
    return f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"


class _NoLogError(TraceError):
    """A directory has no log."""


class _Found(NamedTuple):
    """The logs at one path."""

    path: str
    logs: list[RawLog]
    is_one_run: bool
    """Whether the logs are one run, not a run each."""


_MAX_DEPTH = 4
"""Levels of folders that are searched, as logs/experiment/seed-1/version_0."""
_SKIPPED_FOLDERS = re.compile(r"\..*|__.*|(?:checkpoint|step|global_step|iter)[-_]?\d+(?:\.\d+)?")
"""Names of folders that are not searched, because they have no logs or the logs of a checkpoint."""


def _read_path(
    path: str, columns: Mapping[str, str], failed: list[Unreadable], depth: int = _MAX_DEPTH
) -> list[_Found]:
    """Reads a file, a directory, or the runs in the folders of a directory without a log.

    Adds folders whose logs cannot be used to `failed`. Raises TraceError or OSError if there is no
    usable log.
    """
    if not os.path.isdir(path):
        return [_read_file(path, columns)]
    try:
        return [_read_directory(path, columns, failed)]
    except UnjudgeableLog:
        raise
    except TraceError as error:
        no_log = error
    found: list[_Found] = []
    names: list[str] = []
    if depth:
        names = sorted(os.listdir(path), key=_natural)
    for name in names:
        folder = os.path.join(path, name)
        if not os.path.isdir(folder) or os.path.islink(folder) or _SKIPPED_FOLDERS.fullmatch(name):
            continue
        try:
            found += _read_path(folder, columns, failed, depth - 1)
        except _NoLogError:
            continue  # such files are weights, code or settings
        except Exception as error:  # damaged bytes may raise any error
            failed.append(Unreadable(folder, _reason(error), isinstance(error, UnjudgeableLog)))
    if not found and not any(each.path.startswith(path) for each in failed):
        raise no_log
    return found


def _read_directory(path: str, columns: Mapping[str, str], failed: list[Unreadable]) -> _Found:
    """Reads the files of the preferred format, in natural order: log-2 precedes log-10.

    Without a log in the directory, the log in the newest checkpoint of the Hugging Face Trainer is
    read, which is complete up to that step. Adds logs that are not judged to `failed`. Raises
    TraceError if no file is a usable log.
    """
    files = _find_files(path)
    by_format = files.by_format
    if not by_format:
        if not files.states:
            raise _no_log_error(path, files)
        by_format = {_DOCUMENT.name: [max(files.states)[1]]}
    unusable = files.unusable
    is_log = False
    for form in FORMATS:
        if form.name not in by_format:
            continue
        logs: list[RawLog] = []
        for file in by_format[form.name]:
            try:
                logs += _read_file(file, columns).logs
            except UnjudgeableLog as error:
                if form.is_one_run:
                    raise
                failed.append(Unreadable(file, str(error), not_judged=True))
            except (TraceError, OSError) as error:
                unusable.append(f"{file}: {_reason(error)}")
                # Text of any kind looks like a table at first.
                is_log = is_log or form is not _TABLE or file.endswith((".csv", ".tsv"))
        if logs:
            logs[0].notes.extend(unusable)
            return _Found(path, logs, form.is_one_run)
    if any(os.path.dirname(each.path) == path.rstrip(os.sep) for each in failed):
        return _Found(path, [], is_one_run=False)
    if is_log:
        raise TraceError("; ".join(unusable))
    raise _NoLogError("; ".join(unusable))


class _Files(NamedTuple):
    """The files of a directory that may be logs."""

    by_format: dict[str, list[str]]
    """Name of a format -> the paths of its files, in natural order."""
    states: list[tuple[int, str]]
    """Step and path of each `trainer_state.json` in a checkpoint."""
    unusable: list[str]
    """A sentence for each file that cannot be opened."""
    has_events: bool
    """Whether the directory has a file with a Healer's events, which is no log."""


def _find_files(path: str) -> _Files:
    """Finds the files of a directory that may be logs, and detects their formats."""
    by_format: dict[str, list[str]] = {}
    states: list[tuple[int, str]] = []
    unusable: list[str] = []
    has_events = False
    for name in sorted(os.listdir(path), key=_natural):
        file = os.path.join(path, name)
        state = os.path.join(file, _TRAINER_STATE)
        match = _CHECKPOINT.match(name)
        if match and os.path.isfile(state):
            states.append((int(match[1]), state))
        if name.startswith(".") or name.endswith(_NO_LOG) or not os.path.isfile(file):
            has_events = has_events or name.endswith(_NO_LOG[0])
            continue
        try:
            by_format.setdefault(detect_format(read_head(file)).name, []).append(file)
        except OSError as error:
            unusable.append(f"{file}: {_reason(error)}")
        except TraceError:
            continue  # they are often weights and configurations
    return _Files(by_format, states, unusable, has_events)


def _no_log_error(path: str, files: _Files) -> TraceError:
    """Builds the error for a directory without a file that may be a log."""
    if files.has_events:
        return TraceError(
            "it has healcore's events without its metrics (*.metrics.jsonl), which have the loss "
            "and the norm of each step. `healcore report` shows the events"
        )
    reasons = "; ".join(files.unusable)
    if not reasons:
        reasons = "it is a directory without a file of a known format"
        if any(_SAVED_WEIGHTS.search(name) for name in os.listdir(path)):
            reasons += f"; it holds checkpoints: write healcore probe checkpoint {path}"
    return _NoLogError(reasons)


def _natural(name: str) -> list[str | int]:
    """Key that sorts numbers in names by value: log-2 before log-10."""
    key: list[str | int] = []
    for at, part in enumerate(re.split(r"(\d+)", name)):
        if at % 2:  # re.split returns text and numbers in turn
            key.append(int(part))
        else:
            key.append(part)
    return key


def _read_file(path: str, columns: Mapping[str, str]) -> _Found:
    """Reads the usable logs in one file: several logs for an export of several runs.

    Raises TraceError, or OSError if the file cannot be read.
    """
    chosen = {*columns.values()}
    form = detect_format(read_head(path), chosen)
    if form.read is None:
        logs = read_tables(path, columns)
    else:
        read = form.read
        if form in (_CONSOLE, _NAMED):
            read = partial(read, chosen=chosen)
        logs = formats.read_records(path, read, form.is_step, columns)
    usable: list[RawLog] = []
    for log in logs:
        if any(name in log.logged and log.logged[name].any() for name in JUDGED_SIGNALS):
            usable.append(log)
    if usable:
        return _Found(path, usable, form.is_one_run)
    problems = logs[-1].problems
    if problems:
        line, text, _ = problems[0]
        raise TraceError(f"no usable row: {counted(len(problems), 'problem')}, line {line}: {text}")
    raise TraceError("no usable row: no row logs a loss or a gradient norm")


class Format(NamedTuple):
    """A format of logs.

    A new format is an entry in `FORMATS` and a test in `detect_format`. The reader only has to
    yield records: names of columns, damaged cells and resumes are the same for all formats.
    """

    name: str
    read: Callable[..., printed.Records] | None = None
    """Yields the records of a file, and adds damage to the problems. None for tables."""
    is_step: Callable[[printed.Fields], bool] = bool
    """Whether a record is a step of the run."""
    is_one_run: bool = False
    """Whether the files in one directory are one run, not a run each."""


_TYPED = Format("typed records", formats.json_lines, formats.is_typed_step, is_one_run=True)
_DOCUMENT = Format("trainer_state.json", formats.json_document, formats.is_no_summary)
_TABLE = Format("CSV")
_PLAIN = Format("JSON Lines", formats.json_lines)
_TENSORBOARD = Format("TensorBoard events", formats.scalars, is_one_run=True)
_DICTS = partial(printed.printed_lines, printed.printed_record)
_CONSOLE = Format("console output", _DICTS, formats.is_no_summary)
_NUMBERS = partial(printed.printed_lines, printed.named_numbers)
_NAMED = Format("lines with named numbers", _NUMBERS)
FORMATS = (_TYPED, _DOCUMENT, _TABLE, _PLAIN, _TENSORBOARD, _CONSOLE, _NAMED)
"""Formats by preference. In a directory only the first format with a usable log is read."""


def detect_format(start: bytes, chosen: Container[str] = ()) -> Format:
    """Detects the format of a file by its start, whatever its name.

    Args:
        start: the first megabyte of the file.
        chosen: names of signals that the user has named.

    Returns:
        The format. Text that is nothing else is taken for a table.

    Raises:
        TraceError: the file is empty, binary, UTF-16 text, or JSON without a log.
    """
    if not start.strip():
        raise TraceError("it is empty")
    if b"brain.Event:" in start[:64]:
        return _TENSORBOARD
    if start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise TraceError(
            "it is UTF-16 text, and healcore reads UTF-8. `>` of Windows PowerShell writes UTF-16: "
            "write `Get-Content OLD | Set-Content -Encoding utf8 NEW`, or elsewhere "
            "`iconv -f UTF-16 -t UTF-8 OLD > NEW`"
        )
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary, and not {KNOWN_FORMATS}")
    header = re.split(r"[,;\t]", text.partition("\n")[0])
    is_table = len(header) > 1 and any(is_known(name.strip(' "\r')) for name in header)

    def has_signals(parse: Callable[[str], printed.Fields | None]) -> bool:
        return any(printed.signals_of(parse(line), chosen) for line in text.splitlines())

    if not is_table and has_signals(printed.printed_record):
        return _CONSOLE
    if re.match(r"\[\s*[{\]]", text) or formats.LOG_HISTORY.search(text):
        return _DOCUMENT
    found: list[printed.Fields] = []
    for line in text.splitlines()[:200]:
        record = _parse(line)
        if record is not None:
            found.append(record)
    if found:
        if any(map(formats.is_typed_step, found)):
            return _TYPED
        return _PLAIN
    if text.startswith("{"):
        raise TraceError(f"it is JSON, but has no 'log_history' and is not {KNOWN_FORMATS}")
    if not is_table and has_signals(printed.named_numbers):
        return _NAMED
    return _TABLE


def _parse(line: str) -> dict[str, Any] | None:
    """The JSON object in a line, or None."""
    if not line.lstrip().startswith("{"):
        return None
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
