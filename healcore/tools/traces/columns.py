"""Makes the columns of a log from the records of a file: which are its rows, steps and signals."""

from __future__ import annotations

import itertools
import math
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
_ENGINE = "engine"
"""Key with the name of the optimizer in healcore's metrics."""
_RUN_NAME = re.compile(
    r"(?:(?:run|trial|experiment|job)_)?(?:name|id|key)|run|trial|experiment|uuid|model"
)
"""Columns that identify a run. In the log of one run they have one value."""


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
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal, "epoch", "epoch_length" and "step", if the file has steps, which are
    finite."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[RowProblem]
    """Lines and cells that could not be used."""
    notes: list[str]
    """Remarks about usable content, each with the path."""

    @property
    def rows(self) -> int:
        """Number of rows n, the length of each array."""
        return len(next(iter(self.logged.values())))


class _Cells:
    """The fields of many records that may be read, as columns.

    Records may have hundreds of fields, which would need a gigabyte of memory in a long log.

    Args:
        records: the records of a file.
        chosen: the keys that the user chose.
    """

    def __init__(self, records: Records, chosen: Mapping[str, str]) -> None:
        self.lines: list[int] = []
        self.columns: dict[str, list[Any]] = {}
        self.names: dict[str, None] = {}
        """The keys of all records, in the order of the file."""
        self.forms: dict[tuple[str, ...], int] = {}
        """The keys of a record -> number of this form."""
        self.form_of: list[int] = []
        """Number of the form of each record."""
        while block := list(itertools.islice(records, _BLOCK)):
            of_block: list[Fields] = [record for _, record in block]
            for form in dict.fromkeys(map(tuple, of_block)):
                for name in () if form in self.forms else form:
                    if name not in self.names and _is_kept(name, chosen):
                        self.columns[name] = [None] * len(self.lines)
                    self.names[name] = None
                self.forms.setdefault(form, len(self.forms))
            self.form_of += map(self.forms.__getitem__, map(tuple, of_block))
            for name, column in self.columns.items():
                column += [record.get(name) for record in of_block]
            self.lines += [line for line, _ in block]


def _is_kept(name: str, chosen: Mapping[str, str]) -> bool:
    """Whether a field may be a step, a signal, or what identifies a run."""
    metric = name.rpartition(" - ")[2]  # of a chart exported from Weights & Biases
    own = {EPOCH_LENGTH, _ENGINE, *chosen.values()}
    known = role(name)[0] or role(metric)[0] or _RUN_NAME.fullmatch(normalize(name))
    return not own.isdisjoint((name, metric)) or known is not None


def read_logs(
    path: str, records: Records, problems: list[RowProblem], columns: Mapping[str, str]
) -> list[RawLog]:
    """Reads the logs in a file: one log, or one for each run or optimizer.

    Args:
        path: the file.
        records: the records of the file. Reading them adds to the problems.
        problems: the lines that the reader could not use.
        columns: the keys that the user chose, by signal or "step".

    Returns:
        The logs, at least one. A run without a known column is a note of the first log.

    Raises:
        TraceError: no record has a loss or a gradient norm, or two keys may be the same signal.
        UnjudgeableLog: the records are runs, or too many of them are damaged.
    """
    cells = _Cells(records, columns)
    no_row = "no usable row: no row logs a loss or a gradient norm"
    if not cells.names:
        raise _with_first(no_row, problems)
    logs: list[RawLog] = []
    reasons: list[str] = []
    exported = _exported_runs(list(cells.names))
    engines = list(dict.fromkeys(filter(None, cells.columns.get(_ENGINE, ()))))
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
        _refuse_table_of_runs(cells, keys.get(STEP))
        if EPOCH_LENGTH in cells.names:
            keys[EPOCH_LENGTH] = EPOCH_LENGTH
        notes = [f"{path}: {note}" for note in notes]
        is_row = _is_row(cells, keys)
        if len(exported) > 1:  # a row belongs to the runs that have a cell in it
            own_columns = [cells.columns[keys[name]] for name in SIGNALS if name in keys]
            rows = zip(*own_columns, strict=True)
            is_row &= np.array([not {None, ""}.issuperset(row) for row in rows])
        rows_of = {run if len(exported) > 1 else None: is_row}
        if len(engines) > 1:
            column = np.array(cells.columns[_ENGINE], object)
            rows_of = {str(engine): is_row & (column == engine) for engine in engines}
        for title, rows in rows_of.items():
            logs.append(_log(path, title, cells, keys, rows, problems, notes))
    usable: list[RawLog] = []
    for log in logs:
        if any(log.logged[name].any() for name in JUDGED_SIGNALS if name in log.logged):
            usable.append(log)
    if not logs:
        raise TraceError(reasons[0])
    if not usable:
        raise _with_first(no_row, logs[-1].problems)
    usable[0].notes.extend(reasons)
    return usable


def _with_first(text: str, problems: Sequence[RowProblem]) -> TraceError:
    """An error with the first problem of a file."""
    if problems:
        line, first, _ = problems[0]
        text = f"{text}: {counted(len(problems), 'problem')}, line {line}: {first}"
    return TraceError(text)


def _exported_runs(names: Sequence[str]) -> dict[str | None, dict[str, str]]:
    """Finds the columns of each run in a chart exported from Weights & Biases, by metric.

    Such a chart has a column for the steps, and a column "RUN - METRIC" for every run. Any other
    log is one run, None.
    """
    x, *others = names
    runs: dict[str | None, dict[str, str]] = {}
    for name in others:
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            return {None: {each: each for each in names}}
        runs.setdefault(run, {x: x})[metric] = name
    return runs or {None: {x: x}}


def _refuse_table_of_runs(cells: _Cells, step: str | None) -> None:
    """Raises UnjudgeableLog if each row is another run, so that the loss of the rows is no curve.

    A table of runs names another run in each row. A log may do so too, with an id of each line, but
    its steps increase.
    """
    for name, column in cells.columns.items():
        if not _RUN_NAME.fullmatch(normalize(name)):
            continue
        runs = {cell for cell in column if isinstance(cell, str) and not cell.strip().isdecimal()}
        is_curve = len(runs) <= max(1, 0.9 * len(column))
        if step and not is_curve:
            numbers, _, problems = _parse(cells.columns[step])
            is_curve = not problems and bool((np.diff(numbers) > 0).all())
        if not is_curve:
            raise UnjudgeableLog(
                f"it is a table of runs, with one run in each row (column '{name}'), and no curve "
                "of a run. Export the history of a run: in W&B the chart as CSV, or run.history() "
                "in Python"
            )


def _is_row(cells: _Cells, keys: Mapping[str, str]) -> np.ndarray:
    """Finds the records that are rows, bool (n,), and completes their steps.

    A record is a row if it has a signal, or if it is a record of a step that lacks its signals:
    some programs leave out what is NaN. Such a record has no key that steps do not have.
    """
    signals = {keys[name] for name in SIGNALS if name in keys}
    judged = {keys[name] for name in JUDGED_SIGNALS if name in keys}
    places = {keys[name] for name in (STEP, EPOCH) if name in keys}
    of_steps: set[str] = set()
    for names in cells.forms:
        if not judged.isdisjoint(names):
            of_steps.update(names)
    of_forms: list[bool] = []
    for names in cells.forms:
        has_place = not places or not places.isdisjoint(names)
        lacks_signals = has_place and len(names) > 1 and of_steps.issuperset(names)
        of_forms.append(lacks_signals or not signals.isdisjoint(names))
    is_row = np.array(of_forms)[cells.form_of]
    forms = list(cells.forms)
    if STEP in keys and None in cells.columns[keys[STEP]]:
        # A record of another kind may name its step in another way. An evaluation without a step
        # belongs to the step before it.
        steps = cells.columns[keys[STEP]]
        for name, column in cells.columns.items():
            if role(name)[0] == STEP:
                both = zip(steps, column, strict=True)
                steps = [other if own is None else own for own, other in both]
        cells.columns[keys[STEP]] = steps
        own = [cells.columns[keys[name]] for name in (STEP, EPOCH, EPOCH_LENGTH) if name in keys]
        last: int | None = None
        for at, form in enumerate(cells.form_of):
            if not of_forms[form]:
                continue
            if steps[at] is None and last is not None and judged.isdisjoint(forms[form]):
                for column in own:
                    column[at] = column[last]
            last = at
    return is_row


def _log(
    path: str,
    run: str | None,
    cells: _Cells,
    keys: Mapping[str, str],
    is_row: np.ndarray,
    problems: Sequence[RowProblem],
    notes: Sequence[str],
) -> RawLog:
    """Parses the cells of the rows of a log; rows without a finite step are left out.

    Raises UnjudgeableLog if more than a tenth of the lines of a column cannot be used.
    """
    problems = list(problems)
    rows = is_row.tolist()
    lines = [*itertools.compress(cells.lines, rows)]
    numbers: dict[str, np.ndarray] = {}
    logged: dict[str, np.ndarray] = {}
    if STEP in keys:
        column = [*itertools.compress(cells.columns[keys[STEP]], rows)]
        if str in set(map(type, column)):
            column = [_SLASH.sub("", cell) if type(cell) is str else cell for cell in column]
        steps, _, found = _parse(column)
        has_step = np.isfinite(steps)
        judged = [keys[name] for name in JUDGED_SIGNALS if name in keys]
        values = [*itertools.compress(cells.columns[judged[0]], rows)]
        # A line without a step and a loss is no step of the run, such as the mean of an epoch.
        for at in np.flatnonzero(~has_step).tolist():
            text = f"'{keys[STEP]}': {found.get(at, 'missing or not finite')}: the row is skipped"
            problems.append(RowProblem(lines[at], text, unusable=values[at] not in (None, "")))
        lines = [*itertools.compress(lines, has_step.tolist())]
        is_row[is_row] = has_step
        rows = is_row.tolist()
        numbers[STEP] = steps[has_step]
    _refuse_unusable(problems, len(lines))
    for name, key in keys.items():
        if name == STEP:
            continue
        column = [*itertools.compress(cells.columns[key], rows)]
        numbers[name], mask, found = _parse(column)
        if name not in SIGNALS:
            continue
        logged[name] = mask
        of_signal: list[RowProblem] = []
        for at, text in found.items():
            text = f"'{key}': {text}: the row is read without {name}"
            of_signal.append(RowProblem(lines[at], text, name in JUDGED_SIGNALS))
        _refuse_unusable(of_signal, int(mask.sum()))
        problems += of_signal
    problems.sort(key=lambda problem: problem.line)
    return RawLog(path, run, numbers, logged, problems, list(notes))


def _parse(cells: Sequence[Any]) -> tuple[np.ndarray, np.ndarray, dict[int, str]]:
    """Parses n cells with `parse_number`.

    Returns the numbers, float64 (n,), NaN for no number; whether there is a value, bool (n,); and
    what is wrong with a cell, by its row.
    """
    problems: dict[int, str] = {}
    kinds = set(map(type, cells))
    try:  # in a fraction of the time of cell after cell
        if kinds == {str} and "_" not in "".join(cells):
            cells = [*map(float, cells)]
        if kinds <= {float, int, type(None)} or type(cells[0]) is float:
            logged = np.array([cell is not None for cell in cells], bool)
            return np.array(cells, np.float64), logged, problems
    except (OverflowError, ValueError):
        pass
    numbers = np.full(len(cells), math.nan)
    logged = np.zeros(len(cells), bool)
    for at, cell in enumerate(cells):
        try:
            number = parse_number(cell)
        except ValueError as error:
            problems[at] = str(error)
            continue
        if number is not None:
            numbers[at] = number
            logged[at] = True
    return numbers, logged, problems


def _refuse_unusable(problems: Sequence[RowProblem], usable: int) -> None:
    """Raises UnjudgeableLog if more than a tenth of the lines, and more than one, are unusable.

    One line alone is the usual end of a run that was killed while it wrote.
    """
    unusable = sorted(problem for problem in problems if problem.unusable)
    count = len(unusable)
    if count > 1 and count > _MAX_UNUSABLE * (count + usable):
        first = unusable[0]
        where = "first: "
        if first.line:
            where = f"first in line {first.line}: "
        raise UnjudgeableLog(
            f"{count:,} of {counted(count + usable, 'line')} cannot be used, {where}{first.text}. "
            "Write plain numbers (1234.5) and a header above rows with other columns, or name "
            "another column (--column loss=NAME)"
        )
