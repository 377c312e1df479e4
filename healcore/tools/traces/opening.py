"""Reads paths as traces: finds the logs in folders, and the rows and signals in the records."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore import regular_file
from healcore.console import counted, error_text
from healcore.tools.traces import formats, printed
from healcore.tools.traces.formats import Records, RowProblem, UnjudgeableLog, parse_number
from healcore.tools.traces.names import (
    EPOCH,
    EPOCH_LENGTH,
    JUDGED_SIGNALS,
    KNOWN_COLUMNS,
    SIGNALS,
    STEP,
    TraceError,
    find_columns,
    has_role,
    normalize,
    quote_names,
    role,
)
from healcore.tools.traces.trace import RawLog, Trace, Unreadable, join_logs

_KNOWN_FORMATS = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, console output "
    "that names the numbers, a TensorBoard event file, or healcore's own metrics"
)
_HEAD_BYTES = 1 << 20
"""Number of bytes from which the format of a file is recognized."""
_NO_LOG = (".events.jsonl", ".lock", ".py", ".sh", ".md", ".ipynb", ".toml", ".yaml", ".yml")
"""Ends of the names of files that have no row for each step: a Healer's events, code, settings."""
_MAX_DEPTH = 4
"""Levels of folders that are searched, as logs/experiment/seed-1/version_0."""
_SKIPPED_FOLDERS = re.compile(r"\..*|__.*|(?:checkpoint|step|global_step|iter)[-_]?\d+(?:\.\d+)?")
"""Names of folders that are not searched, because they have no logs or the logs of a checkpoint."""
_ABSENT = np.array(None)
"""No cell, for comparisons with columns."""
_LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_MAX_UNUSABLE = 0.1
"""Largest fraction of the lines of a column that may be unusable in a log that is judged."""
_MAX_LAST = 2
"""Largest number of unusable lines at the end of a log that is judged."""
_RUN_NAME = re.compile(
    r"(?:(?:run|trial|experiment|job)_)?(?:name|id|key)|run|trial|experiment|uuid|model"
    r"|engine"  # the optimizer in healcore's metrics
)
"""Columns that identify a run. In the log of one run they have one value."""
_RUN_FACTS = frozenset({"state", "status", "created", "runtime", "sweep"})
"""Columns that trackers add to a table of runs."""
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
                logs = _read_file(path, _detect_format(path, columns), columns)
                found = _group(path, logs, is_one_run=False)
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
    if isinstance(error, TraceError):
        reason = str(error)
    else:
        text = getattr(error, "strerror", None) or error_text(error)
        reason = f"it cannot be read: {text[:200]}"
    return Unreadable(path, reason, isinstance(error, UnjudgeableLog))


def _read_directory(path: str, columns: Mapping[str, str], failed: list[Unreadable]) -> _Runs:
    """Reads in each folder the files of the preferred format.

    Folders in a folder with a log are not searched.

    Args:
        path: the directory.
        columns: the keys that the user chose.
        failed: gets the files and folders whose log cannot be used.

    Raises:
        TraceError: there is no log.
    """
    found: _Runs = []
    known = len(failed)
    doubtful: list[tuple[str, Unreadable]] = []  # by folder: they may be files of another kind

    def report_folder(error: OSError) -> None:
        failed.append(_unreadable(str(error.filename), error))

    for folder, folders, names in os.walk(path, onerror=report_folder):
        logs: list[RawLog] = []
        unusable: list[Unreadable] = []
        preferred: Callable[..., Records] | None = None
        for form, file in _find_files(folder, folders, names, columns, unusable):
            if logs and form is not preferred:
                break
            preferred = form
            try:
                logs += _read_file(file, form, columns)
            except Exception as error:  # damaged bytes may raise any error
                failure = _unreadable(file, error)
                if failure.not_judged:
                    failed.append(failure)
                    if form in _OF_ONE_RUN:  # the other files are parts of the same run
                        logs.clear()
                        folders.clear()
                        break
                # Text of any kind looks like a table at first.
                elif form is not formats.table_rows or file.endswith((".csv", ".tsv")):
                    unusable.append(failure)
        if logs:
            logs[0].notes.extend(f"{each.path}: {each.problem}" for each in unusable)
            found += _group(folder, logs, preferred in _OF_ONE_RUN)
        else:
            doubtful += [(folder, each) for each in unusable]
        depth = os.path.relpath(folder, path).count(os.sep)
        if logs or depth > _MAX_DEPTH:
            folders.clear()
        folders[:] = [name for name in folders if not _SKIPPED_FOLDERS.fullmatch(name)]
        folders.sort(key=_natural)
    for folder, failure in doubtful:
        if not any(name.startswith(folder) for name, _ in found):
            failed.append(failure)
    if not found and len(failed) == known:
        raise TraceError(
            "it is a directory without a log of a known format. healcore's own is *.metrics.jsonl, "
            "and `healcore probe checkpoint` reads checkpoints"
        )
    return found


def _find_files(
    folder: str,
    folders: Sequence[str],
    names: Sequence[str],
    columns: Mapping[str, str],
    unusable: list[Unreadable],
) -> list[tuple[Callable[..., Records], str]]:
    """Finds the possible logs in a folder, the preferred format first, in natural order.

    The newest checkpoint of the Hugging Face Trainer has the log up to its step. It is read if its
    folder has no other file of a known format. `unusable` gets the files that cannot be opened.
    """
    files: list[tuple[Callable[..., Records], str]] = []
    for name in sorted(names, key=_natural):
        file = os.path.join(folder, name)
        # A pipe could block the read forever.
        if name.startswith(".") or name.endswith(_NO_LOG) or not os.path.isfile(file):
            continue
        try:
            files.append((_detect_format(file, columns), file))
        except OSError as error:
            unusable.append(_unreadable(file, error))
        except TraceError:
            continue  # they are often weights and configurations
    files.sort(key=lambda found: _FORMATS.index(found[0]))
    if files:
        return files
    for name in sorted(folders, key=_natural, reverse=True):
        state = os.path.join(folder, name, "trainer_state.json")
        if _SKIPPED_FOLDERS.fullmatch(name) and os.path.isfile(state):
            return [(formats.json_document, state)]
    return []


def _group(path: str, logs: list[RawLog], is_one_run: bool) -> _Runs:
    """Groups the logs at one path: a run each, unless they are the files of one run."""
    if all(log.run is None for log in logs) and (is_one_run or len(logs) == 1):
        return [(path, logs)]
    runs: _Runs = []
    for log in logs:
        name = log.path
        if log.run:
            name += f"#{log.run}"
        runs.append((name, [log]))
    return runs


def _natural(name: str) -> list[tuple[str, int]]:
    """Key that sorts numbers in names by value: log-2 before log-10."""
    return [(text, int(part or 0)) for text, part in re.findall(r"(\D*)(\d*)", name)]


_FORMATS: tuple[Callable[..., Records], ...] = (
    formats.typed_steps,
    formats.json_document,
    formats.table_rows,
    formats.json_lines,
    formats.scalars,
    printed.printed_dicts,
    printed.printed_numbers,
)
"""The readers of the formats by preference. In a folder only the first format with a usable log is
read. A new format is a reader here and a test in `_detect_format`: names of columns, damaged cells
and resumes are the same for all formats."""
_OF_ONE_RUN = (formats.typed_steps, formats.scalars)
"""Formats whose files in one folder are one run, not a run each."""


def _detect_format(path: str, columns: Mapping[str, str]) -> Callable[..., Records]:
    """Detects the format of a file by its first megabyte, whatever its name.

    Args:
        path: the file.
        columns: the keys that the user chose.

    Returns:
        The format. Text that is nothing else is taken for a table.

    Raises:
        TraceError: the file is empty, binary, UTF-16 text, or JSON without a log.
        OSError: the file cannot be read, or is a pipe or a device.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        start = file.read(_HEAD_BYTES)
    if not start.strip():
        raise TraceError("it is empty")
    if b"brain.Event:" in start[:64]:
        return formats.scalars
    text = start.decode("utf-8-sig", errors="replace").lstrip()
    if "\0" in text[:512]:
        raise TraceError(f"it is binary or UTF-16 text, and not {_KNOWN_FORMATS}, in UTF-8")
    lines = text.splitlines()
    header = [name.strip(' "') for name in re.split(r"[,;\t|]", lines[0])]
    is_table = len(header) > 1 and has_role(header, (STEP, EPOCH, *SIGNALS))

    def has_signals(parse: Callable[[str], formats.Fields | None]) -> bool:
        return not is_table and any(
            printed.has_signal(parse(line), columns.values()) for line in lines
        )

    if has_signals(printed.printed_record):
        return printed.printed_dicts
    if re.match(r"\[\s*[{\]]", text) or _LOG_HISTORY.search(text):
        return formats.json_document
    values = [formats.json_of_line(line) for line in lines[:200] if line.lstrip()[:1] == "{"]
    found = [value for value in values if value is not None]
    if any(map(formats.is_typed_step, found)):
        return formats.typed_steps
    if found:
        return formats.json_lines
    if has_signals(printed.named_numbers):
        return printed.printed_numbers
    return formats.table_rows


class _Cells(NamedTuple):
    """The fields of n records as columns."""

    lines: np.ndarray
    """int (n,): the line of each record."""
    forms: list[tuple[str, ...]]
    """The keys of a record, for each different one, in the order of the file."""
    form_of: np.ndarray
    """int (n,): which form each record has."""
    columns: Mapping[str, np.ndarray]
    """(n,) by name, float64 or objects with None for no cell: the fields that may be read. Records
    may have hundreds, which would need a gigabyte of memory in a long log."""


def _read_cells(records: Records, chosen: Mapping[str, str]) -> _Cells:
    """Makes columns of records; `chosen` has the keys that the user chose."""
    lines: list[int] = []
    forms: dict[tuple[str, ...], int] = {}
    form_of: list[int] = []
    columns: dict[str, list[Any]] = {}
    for line, record in records:
        form = tuple(record)
        if form not in forms:
            forms[form] = len(forms)
            for name in form:
                if _is_kept(name, chosen):
                    columns.setdefault(name, [None] * len(lines))
        lines.append(line)
        form_of.append(forms[form])
        for name, column in columns.items():
            column.append(record.get(name))
    arrays = {name: np.fromiter(cells, object, len(cells)) for name, cells in columns.items()}
    return _Cells(np.array(lines, int), list(forms), np.array(form_of, int), arrays)


def _is_kept(name: str, chosen: Mapping[str, str]) -> bool:
    """Whether a field may be a step, a signal, or what identifies a run."""
    metric = name.rpartition(" - ")[2]  # of a chart exported from Weights & Biases
    own = {EPOCH_LENGTH, *chosen.values()}
    known = role(name)[0] or role(metric)[0] or _RUN_NAME.fullmatch(normalize(name))
    return not own.isdisjoint((name, metric)) or known is not None


def _read_file(path: str, read: Callable[..., Records], columns: Mapping[str, str]) -> list[RawLog]:
    """Reads the logs in a file: one log, or one for each run.

    Args:
        path: the file.
        read: the reader of its format.
        columns: the keys that the user chose, by signal or "step".

    Returns:
        The logs, at least one.

    Raises:
        TraceError: no record has a loss or a gradient norm, or two keys may be the same signal.
        UnjudgeableLog: the records are runs, or too many of them are damaged.
        OSError: the file cannot be read.
    """
    problems: list[RowProblem] = []
    if read is formats.table_rows and (table := formats.plain_table(path)):
        header, first, values = table
        at = np.arange(len(values))
        by_name = dict(zip(header, values.T, strict=True))
        cells = _Cells(at + first, [tuple(header)], np.zeros_like(at), by_name)
    elif read is printed.printed_numbers:
        cells = _read_cells(read(path, problems, columns.values()), columns)
    else:
        cells = _read_cells(read(path, problems), columns)
    logs: list[RawLog] = []
    unused = problems
    names = list(dict.fromkeys(itertools.chain(*cells.forms)))
    exported: dict[str | None, dict[str, str]] = {}
    if names:
        exported = _exported_runs(names)
    for run, places in exported.items():
        # --column may name the metric, or the whole title of one run's column.
        own = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        found, notes = find_columns(list(places), own)
        keys = {signal: places[name] for signal, name in found.items()}
        if EPOCH_LENGTH in cells.columns:
            keys[EPOCH_LENGTH] = EPOCH_LENGTH
        is_row = _rows(cells, keys)
        runs: dict[str | None, np.ndarray] = {None: is_row}
        if len(exported) > 1:  # a row belongs to the runs that have a cell in it
            own_columns = [cells.columns[keys[name]] for name in SIGNALS if name in keys]
            values = zip(*own_columns, strict=True)
            has_cell = np.array([not {None, ""}.issuperset(row) for row in values])
            runs = {run: is_row & has_cell}
        elif several := _several_runs(cells, is_row, keys.get(STEP)):
            name, of_row = several
            runs = {each: is_row & (of_row == each) for each in dict.fromkeys(of_row[is_row])}
            notes.append(f"'{name}' names {len(runs)} runs, and each is read by itself")
        notes = [f"{path}: {note}" for note in notes]
        for title, rows in runs.items():
            log = RawLog(path, title, *_parse_rows(cells, keys, rows, problems), list(notes))
            if any(log.logged[name].any() for name in JUDGED_SIGNALS):
                logs.append(log)
            else:
                unused = log.problems
    if not logs:
        text = "no usable row: no row logs a loss or a gradient norm"
        if unused:
            text += f": {counted(len(unused), 'problem')}, {unused[0].describe(path)}"
        raise TraceError(text)
    return logs


def _exported_runs(names: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Finds the columns of each run in a chart exported from Weights & Biases, by metric.

    Such a chart has a column for the steps, and a column "RUN - METRIC" for every run. Any other
    log is one run, None.
    """
    runs: dict[str | None, dict[str, str]] = {}
    for name in names[1:]:
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            runs.clear()
            break
        runs.setdefault(run, {names[0]: names[0]})[metric] = name
    return runs or {None: dict(zip(names, names, strict=True))}


def _rows(cells: _Cells, keys: Mapping[str, str]) -> np.ndarray:
    """Finds the records that are rows, bool (n,), and completes their steps.

    A record is a row if it has a signal, or if it is a record of a step that lacks its signals:
    some programs leave out what is NaN. Such a record has no key that steps do not have.
    """
    signals = {keys[name] for name in SIGNALS if name in keys}
    judged = {keys[name] for name in JUDGED_SIGNALS if name in keys}
    places = {keys[name] for name in (STEP, EPOCH, EPOCH_LENGTH) if name in keys}
    of_steps: set[str] = set()
    for form in cells.forms:
        if not judged.isdisjoint(form):
            of_steps.update(form)
    of_forms: list[tuple[bool, bool]] = []
    for form in cells.forms:
        has_place = not places or not places.isdisjoint(form)
        lacks_signals = has_place and len(form) > 1 and of_steps.issuperset(form)
        is_judged = not judged.isdisjoint(form)
        of_forms.append((lacks_signals or not signals.isdisjoint(form), is_judged))
    is_row, is_judged = np.array(of_forms)[cells.form_of].T
    if STEP in keys:
        steps = cells.columns[keys[STEP]]
        absent = steps == _ABSENT
        if absent.any():
            # A record of another kind may name its step in another way. An evaluation without a
            # step belongs to the step before it.
            for name, column in cells.columns.items():
                if role(name)[0] == STEP:
                    steps[absent] = column[absent]
                    absent = steps == _ABSENT
            before = np.maximum.accumulate(np.where(is_row & ~absent, np.arange(len(steps)), -1))
            late = is_row & absent & ~is_judged & (before >= 0)
            for place in places:
                cells.columns[place][late] = cells.columns[place][before[late]]
    return is_row


def _several_runs(
    cells: _Cells, is_row: np.ndarray, step: str | None
) -> tuple[str, np.ndarray] | None:
    """Finds the column that names the runs of a log with several runs, and its texts, (n,).

    Raises UnjudgeableLog if each row is another run, so that the loss of the rows is no curve. A
    log may also have an id of each line, but then its steps increase.
    """
    is_table = len(_RUN_FACTS.intersection(map(normalize, itertools.chain(*cells.forms)))) > 1
    for name, column in cells.columns.items():
        if not _RUN_NAME.fullmatch(normalize(name)):
            continue
        texts = np.array([str(cell).removesuffix(".0") for cell in column.tolist()], object)
        runs = set(texts[is_row].tolist())
        is_several = len(runs) > 1 and runs.isdisjoint(("", "None"))
        if is_several and not is_table and 2 * len(runs) <= is_row.sum():
            return name, texts
        is_id = all(map(str.isdecimal, runs))
        if step and is_several:
            is_id |= bool((np.diff(_parse(cells.columns[step][is_row])[0]) > 0).all())
        if is_table or (is_several and not is_id):
            raise UnjudgeableLog(
                f"it is a table of runs, with one run in each row (column '{name}'), and no curve "
                "of a run. Export the history of a run: in W&B the chart as CSV, or run.history() "
                "in Python"
            )
    return None


def _parse_rows(
    cells: _Cells, keys: Mapping[str, str], is_row: np.ndarray, problems: Sequence[RowProblem]
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], list[RowProblem]]:
    """Parses the cells of the rows of a log: its lines, numbers, masks and problems.

    Rows without a finite step are left out. Raises UnjudgeableLog if more than a tenth of the lines
    of a column cannot be used.
    """
    problems = list(problems)
    lines = cells.lines[is_row]
    steps = np.full(len(lines), np.nan)
    if STEP in keys:
        steps, _, wrong = _parse(cells.columns[keys[STEP]][is_row])
        has_step = np.isfinite(steps)
        judged = [keys[name] for name in JUDGED_SIGNALS if name in keys]
        values = cells.columns[judged[0]][is_row]
        # A line without a step and a loss is no step of the run, such as the mean of an epoch.
        for at in np.flatnonzero(~has_step).tolist():
            text = f"'{keys[STEP]}': {wrong.get(at, 'missing or not finite')}: the row is skipped"
            problems.append(RowProblem(lines[at], text, unusable=values[at] not in (None, "")))
        is_row = is_row.copy()
        is_row[is_row] = has_step
        lines, steps = lines[has_step], steps[has_step]
    _refuse_unusable(problems, lines)
    numbers = {STEP: steps}
    logged: dict[str, np.ndarray] = {}
    for name in (EPOCH, EPOCH_LENGTH, *SIGNALS):
        numbers[name] = np.full(len(lines), np.nan)
        logged[name] = np.zeros(len(lines), bool)
        if name not in keys:
            continue
        numbers[name], logged[name], wrong = _parse(cells.columns[keys[name]][is_row])
        of_signal: list[RowProblem] = []
        for at, text in wrong.items():
            text = f"'{keys[name]}': {text}: the row is read without {name}"
            of_signal.append(RowProblem(lines[at], text, name in JUDGED_SIGNALS))
        _refuse_unusable(of_signal, lines[logged[name]])
        problems += of_signal
    problems.sort(key=lambda problem: problem.line)
    return lines, numbers, logged, problems


def _parse(column: np.ndarray) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Parses n cells with `parse_number`.

    Returns the numbers, float64 (n,), NaN for no number; whether there is a value, bool (n,); and
    what is wrong with a cell, by its row.
    """
    wrong: dict[int, str] = {}
    if column.dtype == float:
        return column, np.ones(len(column), bool), wrong
    cells: list[Any] = column.tolist()
    if {float, int, type(None)}.issuperset(map(type, cells)):
        try:  # in a fraction of the time of cell after cell
            return np.array(cells, np.float64), column != _ABSENT, wrong
        except OverflowError:
            pass
    numbers: list[float | None] = []
    for at, cell in enumerate(cells):
        number = None
        try:
            number = parse_number(cell)
        except ValueError as error:
            wrong[at] = str(error)
        numbers.append(number)
    logged = np.array([number is not None for number in numbers], bool)
    return np.array(numbers, np.float64), logged, wrong


def _refuse_unusable(problems: Sequence[RowProblem], usable: np.ndarray) -> None:
    """Raises UnjudgeableLog if too many lines are unusable, beside the lines `usable`.

    They are too many if they are more than a tenth, or more than two at the end. One line alone is
    the usual end of a run that was killed while it wrote.
    """
    unusable = sorted(problem for problem in problems if problem.unusable)
    count = len(unusable)
    last = sum(problem.line > usable.max(initial=0) for problem in unusable)
    if count > 1 and (count > _MAX_UNUSABLE * (count + len(usable)) or last > _MAX_LAST):
        first = unusable[0]
        where = ""
        if first.line:
            where = f" in line {first.line}"
        raise UnjudgeableLog(
            f"{count:,} of {counted(count + len(usable), 'line')} cannot be used, first{where}: "
            f"{first.text}. "
            "Write plain numbers (1234.5) and a header above rows with other columns, or name "
            "another column (--column loss=NAME)"
        )
