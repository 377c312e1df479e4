"""Makes the columns of a log from the records of a file: which are its rows, steps and signals."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from healcore.console import counted
from healcore.tools.traces.formats import (
    Fields,
    Records,
    RowProblem,
    UnjudgeableLog,
    parse_number,
)
from healcore.tools.traces.names import (
    EPOCH,
    EPOCH_LENGTH,
    JUDGED_SIGNALS,
    SIGNALS,
    STEP,
    TraceError,
    find_columns,
    normalize,
    role,
)

_BLOCK = 512
"""Records that become columns at once."""
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
_SLASH = re.compile(r"(?<=\d)\s*/\s*\d+\s*$")
"""The end of a step like "10/1000"."""


class RawLog(NamedTuple):
    """The rows of one file, or of one run in a file, as written.

    `join_logs` makes the trace of a run from the raw logs of all its files. All arrays have one
    value for each row.
    """

    path: str
    """Path of the file."""
    run: str | None
    """Name of the run in a file with several runs, or None."""
    lines: np.ndarray
    """int (n,): the line of each row."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal, "epoch", "epoch_length" and "step"; NaN for no number. Steps are
    finite, or the log has none."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[RowProblem]
    """Lines and cells that could not be used."""
    notes: list[str]
    """Remarks about usable content, each with the path."""


class Cells(NamedTuple):
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

    @classmethod
    def of(cls, records: Records, chosen: Mapping[str, str]) -> Cells:
        """Makes columns of records.

        Args:
            records: the records of a file.
            chosen: the keys that the user chose.
        """
        lines: list[int] = []
        forms: dict[tuple[str, ...], int] = {}
        form_of: list[int] = []
        columns: dict[str, list[Any]] = {}
        while block := list(itertools.islice(records, _BLOCK)):
            fields: list[Fields] = [record for _, record in block]
            of_block = list(map(tuple, fields))
            for form in dict.fromkeys(of_block):
                if form not in forms:
                    forms[form] = len(forms)
                    for name in form:
                        if _is_kept(name, chosen):
                            columns.setdefault(name, [None] * len(lines))
            form_of += map(forms.__getitem__, of_block)
            for name, column in columns.items():
                column += [record.get(name) for record in fields]
            lines += [line for line, _ in block]
        arrays = {name: np.fromiter(cells, object, len(cells)) for name, cells in columns.items()}
        return cls(np.array(lines, int), list(forms), np.array(form_of, int), arrays)

    @classmethod
    def of_table(cls, names: Sequence[str], first: int, table: np.ndarray) -> Cells:
        """Makes columns of a table of numbers, float64 (n, len(names)), from line `first` on."""
        rows = np.arange(len(table))
        return cls(rows + first, [tuple(names)], 0 * rows, dict(zip(names, table.T, strict=True)))


def _is_kept(name: str, chosen: Mapping[str, str]) -> bool:
    """Whether a field may be a step, a signal, or what identifies a run."""
    metric = name.rpartition(" - ")[2]  # of a chart exported from Weights & Biases
    own = {EPOCH_LENGTH, *chosen.values()}
    known = role(name)[0] or role(metric)[0] or _RUN_NAME.fullmatch(normalize(name))
    return not own.isdisjoint((name, metric)) or known is not None


def read_logs(
    path: str, cells: Cells, problems: list[RowProblem], columns: Mapping[str, str]
) -> list[RawLog]:
    """Finds the logs in a file: one log, or one for each run or optimizer.

    Args:
        path: the file.
        cells: the records of the file.
        problems: the lines that could not be read.
        columns: the keys that the user chose, by signal or "step".

    Returns:
        The logs, at least one. A run without a known column is a note of the first log.

    Raises:
        TraceError: no record has a loss or a gradient norm, or two keys may be the same signal.
        UnjudgeableLog: the records are runs, or too many of them are damaged.
    """
    logs: list[RawLog] = []
    reasons: list[str] = []
    unused = list(problems)
    names = list(dict.fromkeys(itertools.chain(*cells.forms)))
    exported = _exported_runs(names) if names else {}
    for run, places in exported.items():
        # --column may name the metric, or the whole title of one run's column.
        own = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        try:
            found, notes = find_columns(list(places), own)
        except TraceError as error:
            if run is None:
                raise
            reasons.append(f"{path}: run '{run}': {error}")
            continue
        keys = {signal: places[name] for signal, name in found.items()}
        if EPOCH_LENGTH in cells.columns:
            keys[EPOCH_LENGTH] = EPOCH_LENGTH
        is_row = _rows(cells, keys)
        of_run = {run: is_row}
        if len(exported) > 1:  # a row belongs to the runs that have a cell in it
            own_columns = [cells.columns[keys[name]] for name in SIGNALS if name in keys]
            values = zip(*own_columns, strict=True)
            of_run[run] &= np.array([not {None, ""}.issuperset(row) for row in values])
        elif several := _several_runs(cells, is_row, keys.get(STEP)):
            name, runs = several
            of_run = {each: is_row & (runs == each) for each in dict.fromkeys(runs[is_row])}
            notes.append(f"'{name}' names {len(of_run)} runs, and each is read by itself")
        else:
            of_run = {None: is_row}
        notes = [f"{path}: {note}" for note in notes]
        for title, rows in of_run.items():
            log = RawLog(path, title, *_parse_rows(cells, keys, rows, problems), list(notes))
            if any(log.logged[name].any() for name in JUDGED_SIGNALS):
                logs.append(log)
            else:
                unused += log.problems
    if reasons and not logs:
        raise TraceError(reasons[0])
    if not logs:
        text = "no usable row: no row logs a loss or a gradient norm"
        if unused:
            text += f": {counted(len(unused), 'problem')}, {unused[0].describe(path)}"
        raise TraceError(text)
    logs[0].notes.extend(reasons)
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
            return {None: dict(zip(names, names, strict=True))}
        runs.setdefault(run, {names[0]: names[0]})[metric] = name
    return runs or {None: dict(zip(names, names, strict=True))}


def _rows(cells: Cells, keys: Mapping[str, str]) -> np.ndarray:
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
        absent = _is_absent(steps)
        if absent.any():
            # A record of another kind may name its step in another way. An evaluation without a
            # step belongs to the step before it.
            for name, column in cells.columns.items():
                if role(name)[0] == STEP:
                    steps[absent] = column[absent]
                    absent = _is_absent(steps)
            before = np.maximum.accumulate(np.where(is_row & ~absent, np.arange(len(steps)), -1))
            late = is_row & absent & ~is_judged & (before >= 0)
            for place in places:
                cells.columns[place][late] = cells.columns[place][before[late]]
    return is_row


def _is_absent(column: np.ndarray) -> np.ndarray:
    """Which records lack a cell, bool (n,)."""
    return np.array([cell is None for cell in column.tolist()], bool)


def _several_runs(
    cells: Cells, is_row: np.ndarray, step: str | None
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
    cells: Cells, keys: Mapping[str, str], is_row: np.ndarray, problems: Sequence[RowProblem]
) -> tuple[np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], list[RowProblem]]:
    """Parses the cells of the rows of a log: its lines, numbers, masks and problems.

    Rows without a finite step are left out. Raises UnjudgeableLog if more than a tenth of the lines
    of a column cannot be used.
    """
    problems = list(problems)
    lines = cells.lines[is_row]
    steps = np.full(len(lines), np.nan)
    if STEP in keys:
        column = cells.columns[keys[STEP]][is_row]
        if column.dtype == object:
            texts = [_SLASH.sub("", cell) if type(cell) is str else cell for cell in column]
            column = np.fromiter(texts, object, len(texts))
        steps, _, wrong = _parse(column)
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
            return np.array(cells, np.float64), ~_is_absent(column), wrong
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
        raise UnjudgeableLog(
            f"{count:,} of {counted(count + len(usable), 'line')} cannot be used, first"
            f"{f' in line {first.line}' if first.line else ''}: {first.text}. "
            "Write plain numbers (1234.5) and a header above rows with other columns, or name "
            "another column (--column loss=NAME)"
        )
