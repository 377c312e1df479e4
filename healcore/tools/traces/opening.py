"""Reads paths as traces: detects formats, groups files by run, and orders the files of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Container, Mapping, Sequence
from functools import partial
from typing import NamedTuple

from healcore import regular_file
from healcore.tools.traces import formats, printed
from healcore.tools.traces.columns import Cells, RawLog, read_logs
from healcore.tools.traces.formats import UnjudgeableLog
from healcore.tools.traces.names import (
    EPOCH,
    KNOWN_COLUMNS,
    SIGNALS,
    STEP,
    TraceError,
    has_role,
    quote_names,
)
from healcore.tools.traces.trace import Trace, Unreadable, join_logs

_KNOWN_FORMATS = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, console output "
    "that names the numbers, a TensorBoard event file, or healcore's own metrics"
)
_HEAD_BYTES = 1 << 20
"""Number of bytes from which the format of a file is recognized."""
_TRAINER_STATE = "trainer_state.json"
_NO_LOG = (".events.jsonl", ".lock", ".py", ".sh", ".md", ".ipynb", ".toml", ".yaml", ".yml")
"""Ends of the names of files that have no row for each step: a Healer's events, code, settings."""
_MAX_DEPTH = 4
"""Levels of folders that are searched, as logs/experiment/seed-1/version_0."""
_SKIPPED_FOLDERS = re.compile(r"\..*|__.*|(?:checkpoint|step|global_step|iter)[-_]?(\d+)(?:\.\d+)?")
"""Names of folders that are not searched, because they have no logs or the logs of a checkpoint."""
_LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')

_Runs = list[tuple[str, list[RawLog]]]
"""The name of each run, and the logs of its files."""


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
    if isinstance(paths, str | os.PathLike):
        paths = [paths]  # each letter would be a path, and "/" the whole disk
    names = [os.fspath(path) for path in paths]
    runs: _Runs = []
    failed: list[Unreadable] = []
    for path in names:
        try:
            if os.path.isdir(path):
                found = _read_directory(path, columns, failed)
            else:
                found = _runs(path, _read_file(path, columns), is_one_run=False)
            several = [str(log.run) for _, logs in found for log in logs if log.run is not None]
            if join and several:
                some = quote_names(several)
                raise TraceError(f"it has several runs ({some}), which are not attempts of one run")
            runs += found
        except Exception as error:  # damaged bytes may raise any error
            failed.append(_unreadable(path, error))
    if join and runs:
        name = names[0]
        if len(names) > 1:
            name += f" (+{len(names) - 1})"
        runs = [(name, [log for _, logs in runs for log in logs])]
    traces: list[Trace] = []
    for name, logs in runs:
        try:
            traces.append(join_logs(name, logs))
        except TraceError as error:
            failed.append(_unreadable(name, error))
    return traces, failed


def _unreadable(path: str, error: Exception) -> Unreadable:
    """Describes why a path could not be read."""
    reason = f"it cannot be read ({type(error).__name__}: {str(error)[:200]})"
    if isinstance(error, TraceError):
        reason = str(error)
    elif isinstance(error, OSError):
        reason = f"it cannot be read: {error.strerror or error}"
    return Unreadable(path, reason, isinstance(error, UnjudgeableLog))


class _NoLogError(TraceError):
    """A directory has no log."""


def _read_directory(
    path: str, columns: Mapping[str, str], failed: list[Unreadable], depth: int = _MAX_DEPTH
) -> _Runs:
    """Reads the files of the preferred format, in natural order: log-2 precedes log-10.

    Without a log in the directory, the log in the newest checkpoint of the Hugging Face Trainer is
    read, which is complete up to that step; or the directories in it are. Adds files and
    directories whose log cannot be used to `failed`. Raises _NoLogError if there is no log.
    """
    files: dict[Format, list[str]] = {}
    folders: list[str] = []
    states: list[tuple[int, str]] = []
    unusable: list[Unreadable] = []
    known = len(failed)
    for name in sorted(os.listdir(path), key=_natural):
        file = os.path.join(path, name)
        skipped = _SKIPPED_FOLDERS.fullmatch(name)
        state = os.path.join(file, _TRAINER_STATE)
        if skipped and skipped[1] and os.path.isfile(state):
            states.append((int(skipped[1]), state))
        elif os.path.isdir(file) and not skipped and not os.path.islink(file):
            folders.append(file)
        elif os.path.isfile(file) and not name.startswith(".") and not name.endswith(_NO_LOG):
            try:
                files.setdefault(detect_format(_read_head(file)), []).append(file)
            except OSError as error:
                unusable.append(_unreadable(file, error))
            except TraceError:
                continue  # they are often weights and configurations
    if not files and states:
        files = {_DOCUMENT: [max(states)[1]]}
    for form in FORMATS:
        logs: list[RawLog] = []
        for file in files.get(form, ()):
            try:
                logs += _read_file(file, columns)
            except UnjudgeableLog as error:
                if form.is_one_run:
                    raise
                failed.append(_unreadable(file, error))
            except (TraceError, OSError) as error:
                # Text of any kind looks like a table at first.
                if form is not _TABLE or file.endswith((".csv", ".tsv")):
                    unusable.append(_unreadable(file, error))
        if logs:
            logs[0].notes.extend(f"{file}: {problem}" for file, problem, _ in unusable)
            return _runs(path, logs, form.is_one_run)
    found: _Runs = []
    for folder in folders if depth else ():
        try:
            found += _read_directory(folder, columns, failed, depth - 1)
        except _NoLogError:
            continue  # such files are weights, code or settings
        except Exception as error:  # damaged bytes may raise any error
            failed.append(_unreadable(folder, error))
    if not found and len(failed) == known:
        failed += unusable
    if not found and len(failed) == known:
        raise _NoLogError(
            "it is a directory without a log of a known format. healcore's own is *.metrics.jsonl, "
            "and `healcore probe checkpoint` reads checkpoints"
        )
    return found


def _runs(path: str, logs: list[RawLog], is_one_run: bool) -> _Runs:
    """Groups the logs at one path: a run each, unless they are the files of one run."""
    if all(log.run is None for log in logs) and (is_one_run or len(logs) == 1):
        return [(path, logs)]
    return [(f"{log.path}#{log.run}" if log.run else log.path, [log]) for log in logs]


def _natural(name: str) -> list[tuple[str, int]]:
    """Key that sorts numbers in names by value: log-2 before log-10."""
    return [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", name)]


def _read_head(path: str) -> bytes:
    """The start of a regular file; another kind, such as a pipe, could block the read forever."""
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(_HEAD_BYTES)


def _read_file(path: str, columns: Mapping[str, str]) -> list[RawLog]:
    """Reads the usable logs in one file: several logs for an export of several runs.

    Raises TraceError, or OSError if the file cannot be read.
    """
    chosen = {*columns.values()}
    form = detect_format(_read_head(path), chosen)
    read = form.read
    if form is _NAMED:
        read = partial(read, chosen=chosen)
    problems: list[formats.RowProblem] = []
    if form is _TABLE and (table := formats.plain_table(path)):
        cells = Cells.of_table(*table)
    else:
        cells = Cells.of(read(path, problems), columns)
    return read_logs(path, cells, problems, columns)


class Format(NamedTuple):
    """A format of logs.

    A new format is an entry in `FORMATS` and a test in `detect_format`. The reader only has to
    yield records: names of columns, damaged cells and resumes are the same for all formats.
    """

    read: Callable[..., formats.Records]
    """Yields the records of a file, and adds damage to the problems."""
    is_one_run: bool = False
    """Whether the files in one directory are one run, not a run each."""


_TYPED = Format(formats.typed_steps, is_one_run=True)
_DOCUMENT = Format(formats.json_document)
_TABLE = Format(formats.table_rows)
_PLAIN = Format(formats.json_lines)
_TENSORBOARD = Format(formats.scalars, is_one_run=True)
_CONSOLE = Format(printed.printed_dicts)
_NAMED = Format(printed.printed_numbers)
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
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary or UTF-16 text, and not {_KNOWN_FORMATS}, in UTF-8")
    lines = text.splitlines()
    header = [name.strip(' "') for name in re.split(r"[,;\t|]", lines[0])]
    is_table = len(header) > 1 and has_role(header, (STEP, EPOCH, *SIGNALS))

    def has_signals(parse: Callable[[str], formats.Fields | None]) -> bool:
        return not is_table and any(printed.has_signal(parse(line), chosen) for line in lines)

    if has_signals(printed.printed_record):
        return _CONSOLE
    if re.match(r"\[\s*[{\]]", text) or _LOG_HISTORY.search(text):
        return _DOCUMENT
    values = [formats.json_of_line(line) for line in lines[:200] if line.lstrip()[:1] == "{"]
    found = [value for value in values if value is not None]
    if any(map(formats.is_typed_step, found)):
        return _TYPED
    if found:
        return _PLAIN
    if has_signals(printed.named_numbers):
        return _NAMED
    return _TABLE
