"""Reads tables: CSV files, and charts exported from Weights & Biases.

An exported chart has one column for the steps and a column "RUN - METRIC" for every run. The
columns "RUN - METRIC__MIN" and "RUN - METRIC__MAX" have the extremes of a bin and are not read.
"""

from __future__ import annotations

import csv
import itertools
import os
import shlex
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from healcore.console import counted
from healcore.tools.traces.columns import (
    KNOWN_FORMATS,
    SIGNALS,
    STEP,
    RawLog,
    RowProblem,
    TraceError,
    UnjudgeableLog,
    open_text,
    parse_number,
    parse_rows,
)
from healcore.tools.traces.formats import refuse_table_of_runs
from healcore.tools.traces.names import find_columns, is_known, is_step, normalize

_SHARED = ("wall_time", "relative_time_process", "relative_time_wall", "created", "timestamp")
"""Columns of a W&B export that all runs share, in addition to the step."""


def read_tables(path: str, columns: Mapping[str, str]) -> list[RawLog]:
    """Reads the table of a file, or the runs in a W&B export.

    Args:
        path: a CSV file with a header.
        columns: the names of columns that the user chose, by signal or "step".

    Returns:
        One log, or one for each run of an export. A run without a known column is a note of the
        first log.

    Raises:
        TraceError: the file is not a table, or no run has a column with a known name.
        UnjudgeableLog: the rows are runs, or too many of them are damaged.
    """
    names, begin = _read_header(path)
    if len(names) == 1 and names[0] not in columns.values():
        _refuse_separator(path, names[0])
    if len(names) == 1 and not columns and not is_known(names[0]):
        raise TraceError(f"its first line is '{names[0][:60]}'. It is not {KNOWN_FORMATS}")
    table = _load_numbers(path, begin, len(names))
    headers = {begin: tuple(names)}  # line of each header -> the names of the columns below it
    if table is None:
        headers |= _later_headers(path, begin)
        step = next(filter(is_step, names), None)
        first_rows = _first_rows(path, begin, names)

        def first_cells(name: str) -> list[str | None]:
            return [row.get(name) for row in first_rows]

        refuse_table_of_runs(names, first_cells, step)
    logs: list[RawLog] = []
    reasons: list[str] = []
    runs = _find_runs(names)
    for run in runs:
        try:
            used, notes = _find_places(names, run, columns)
        except TraceError as error:
            reason = str(error)
            if run:
                reason = f"run '{run}': {reason}"
            reasons.append(reason)
            continue
        notes = [f"{path}: {note}" for note in notes]
        title = None
        if len(runs) > 1:
            title = run
        if table is not None and _has_finite_steps(table, used):
            numbers: dict[str, np.ndarray] = {}
            logged: dict[str, np.ndarray] = {}
            for signal, place in used.items():
                numbers[signal] = table[:, place]
                if signal in SIGNALS:
                    logged[signal] = np.ones(len(table), bool)
            logs.append(RawLog(path, title, numbers, logged, [], notes))
        else:
            places: dict[tuple[str, ...], dict[str, int]] = {}  # header -> places of the signals
            labels: dict[str, str] = {}
            for own in dict.fromkeys(headers.values()):
                try:
                    places[own], _ = _find_places(own, run, columns)
                except TraceError:
                    places[own] = {}
                for signal, place in places[own].items():
                    labels.setdefault(signal, f"column '{own[place]}'")
            problems: list[RowProblem] = []
            rows = _csv_rows(path, headers, places, [*labels], title is not None, problems)
            logs.append(parse_rows(path, title, labels, rows, problems, notes))
    if not logs:
        raise TraceError(reasons[0])
    logs[0].notes.extend(f"{path}: {reason}" for reason in reasons)
    return logs


def _find_places(
    names: Sequence[str], run: str | None, columns: Mapping[str, str]
) -> tuple[dict[str, int], list[str]]:
    """Finds the place of each signal of a run among the names of a header, and notes.

    Raises TraceError if the header has neither a loss nor a norm of the run.
    """
    places = _find_runs(names).get(run, [])
    # --column may name the metric, or the whole title of one run's column.
    prefix = f"{run} - "
    metrics = [names[place].removeprefix(prefix) for place in places]
    chosen: dict[str, str] = {}
    for signal, name in columns.items():
        chosen[signal] = name.removeprefix(prefix)
    found, notes = find_columns(metrics, chosen)
    used = {signal: places[metrics.index(metric)] for signal, metric in found.items()}
    return used, notes


def _has_finite_steps(table: np.ndarray, places: Mapping[str, int]) -> bool:
    """Whether all steps of a table (n, columns) are finite, or the table has no steps."""
    if STEP not in places:
        return True
    return bool(np.isfinite(table[:, places[STEP]]).all())


def _read_header(path: str) -> tuple[list[str], int]:
    """The names of the columns, and the number of lines up to the header.

    Raises TraceError if the first line that is not blank is not a header.
    """
    number = 0
    line = ""
    with open_text(path) as file:
        for line in file:
            number += 1
            if line.strip():
                break
    try:
        names = [cell.strip() for cell in next(csv.reader([line]))]
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    try:
        is_data = None not in list(map(parse_number, names))
    except ValueError:
        is_data = False
    if is_data:
        raise TraceError(
            f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
            "columns above it: step,loss,grad_norm"
        )
    return names, number


_OTHER_SEPARATORS = {";": "';'", "\t": r"'\t'", "|": "'|'"}
"""Separator of columns that are not read -> the separator in messages and for `tr`."""


def _refuse_separator(path: str, header: str) -> None:
    """Raises TraceError if the columns of a table are separated by something else than a comma."""
    for separator, shown in _OTHER_SEPARATORS.items():
        names = header.split(separator)
        if len(names) > 1 and any(is_known(name.strip(' "')) for name in names):
            target = f"{os.path.splitext(path)[0]}-commas.csv"
            raise TraceError(
                f"its columns are separated by {shown}, and healcore reads commas. If its numbers "
                "have points, not commas, write "
                f"`tr {shown} ',' < {shlex.quote(path)} > {shlex.quote(target)}`"
            )


def _find_runs(names: Sequence[str]) -> dict[str | None, list[int]]:
    """Finds the places of each run's columns, including shared columns.

    Returns one run, None, for a table that is not an exported chart.
    """
    shared: list[int] = []
    runs: dict[str | None, list[int]] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            plain = normalize(name)
            if not (is_step(name) or plain in _SHARED or plain.endswith("epoch")):
                return {None: list(range(len(names)))}
            shared.append(place)
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            runs.setdefault(run, []).append(place)
    if not runs:
        return {None: shared}
    return {run: [*shared, *own] for run, own in runs.items()}


def _load_numbers(path: str, begin: int, width: int) -> np.ndarray | None:
    """Reads a table whose cells all are plain numbers, or returns None for any other table."""
    with open_text(path) as file, warnings.catch_warnings(action="error"):
        try:
            table = np.loadtxt(file, delimiter=",", skiprows=begin, comments=None, ndmin=2)
        except (ValueError, UserWarning):  # a table without rows gives a warning
            return None
    if table.shape[1] != width:
        return None
    return table


def _csv_lines(path: str, begin: int) -> Iterator[tuple[int, list[str], str]]:
    """Yields the last line, the cells and the error of every row below line `begin`.

    A row has cells or an error. csv ends a cell after 131,072 characters, so that an open quote
    does not join the rest of the file to one row. A blank line is no row.
    """
    with open_text(path) as file:
        rows = csv.reader(itertools.islice(file, begin, None))
        while True:
            cells: list[str] = []
            problem = ""
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                problem = str(error)
            if problem or len(cells) > 1 or "".join(cells).strip():
                yield begin + rows.line_num, cells, problem


def _later_headers(path: str, begin: int) -> dict[int, tuple[str, ...]]:
    """The headers below line `begin`, by their lines: a restarted program writes one again."""
    headers: dict[int, tuple[str, ...]] = {}
    for line, cells, _ in _csv_lines(path, begin):
        if not any(map(_is_number, cells)) and any(map(is_known, cells)):
            headers[line] = tuple(map(str.strip, cells))
    return headers


def _is_number(cell: str) -> bool:
    """Whether a cell has a number."""
    try:
        return parse_number(cell) is not None
    except ValueError:
        return False


def _first_rows(path: str, begin: int, names: list[str]) -> list[dict[str, str]]:
    """The first rows of a table by the names of their columns."""
    rows = itertools.islice(_csv_lines(path, begin), 1000)
    return [dict(zip(names, cells, strict=False)) for _, cells, _ in rows]


_MAX_LAST = 2
"""Largest number of unusable rows at the end of a table that is judged."""


def _csv_rows(
    path: str,
    headers: Mapping[int, tuple[str, ...]],
    places: Mapping[tuple[str, ...], Mapping[str, int]],
    labels: Sequence[str],
    shared: bool,
    problems: list[RowProblem],
) -> Iterator[tuple[int, list[str | None]]]:
    """Yields the last line and the cells of every row; adds damage to the problems.

    In a `shared` table, rows without a signal are skipped, because they belong to other runs.

    Args:
        path: the table.
        headers: the names of the columns by the line of their header, the first one first.
        places: the place of each signal by the names of the header.
        labels: the signals and "step": the order of the cells.
        shared: whether the table has several runs.
        problems: gets a problem for each row that is skipped.
    """
    begin = min(headers)
    header = begin
    rows = 0
    last: list[RowProblem] = []  # the unusable rows since the last usable row
    for line, cells, problem in _csv_lines(path, begin):
        if line in headers:
            header = line
            continue
        rows += 1
        width, used = len(headers[header]), places[headers[header]]
        if not problem and not used:
            problem = f"the header in line {header} has no loss and no norm"
        elif not problem and (len(cells) < width or any(cells[width:])):
            problem = f"{counted(len(cells), 'cell')} where the header has {width}"
        if problem:
            # A line of text has no number.
            unusable = not cells or any(map(_is_number, cells))
            found = RowProblem(line, f"{problem}: the row is skipped", unusable)
            problems.append(found)
            if unusable:
                last.append(found)
            continue
        last = []
        row: list[str | None] = [cells[used[name]] if name in used else None for name in labels]
        if not shared or any(cells[used[name]] for name in SIGNALS if name in used):
            yield line, row
    if len(last) > _MAX_LAST:
        raise UnjudgeableLog(
            f"the last {len(last):,} of {rows:,} rows cannot be used, first in line "
            f"{last[0].line}: {last[0].text}. Write a header above rows with other columns"
        )
