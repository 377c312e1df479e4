"""Reads CSV files, and charts exported from Weights & Biases.

An exported chart has one column for the steps and a column "RUN - METRIC" for every run. The
columns "RUN - METRIC__MIN" and "RUN - METRIC__MAX" have the extremes of a bin and are not read.
"""

from __future__ import annotations

import csv
import itertools
import warnings
from collections.abc import Iterator, Mapping

import numpy as np

from healcore.tools.traces.logs import (
    KNOWN_FORMATS,
    STEP,
    Problem,
    RawLog,
    TraceError,
    open_text,
    parse_number,
    parse_rows,
)
from healcore.tools.traces.names import is_step, normalize, resolve

_SHARED_NAMES = (
    *("wall_time", "relative_time_process", "relative_time_wall", "created", "timestamp"),
)
"""Columns of a W&B export that all runs share, in addition to the step."""


def read_tables(path: str, columns: Mapping[str, str]) -> list[RawLog]:
    """Reads the table of a file, or the runs in a W&B export.

    Raises TraceError if the file is not a table, or no run has a column with a known name.
    """
    names, begin = _read_header(path)
    if len(names) == 1 and not columns and names[0].lower() != "loss":
        raise TraceError(f"its first line is '{names[0][:60]}'. It is not {KNOWN_FORMATS}")
    table = _load_numbers(path, begin, len(names))
    runs = _find_runs(names)
    logs: list[RawLog] = []
    reasons: list[str] = []
    for run, places in runs.items():
        # --column may name the metric, or the whole title of one run's column.
        metrics = [names[place].removeprefix(f"{run} - ") for place in places]
        chosen = {signal: name.removeprefix(f"{run} - ") for signal, name in columns.items()}
        try:
            found, notes = resolve(metrics, chosen)
        except TraceError as error:
            reasons.append(f"run '{run}': {error}" if run else str(error))
            continue
        used = {signal: places[metrics.index(metric)] for signal, metric in found.items()}
        notes = [f"{path}: {note}" for note in notes]
        title = run if len(runs) > 1 else None
        finite = (
            table is not None and np.isfinite(table[:, used[STEP]] if STEP in used else 0).all()
        )
        if table is not None and finite:
            numbers = {signal: table[:, place] for signal, place in used.items()}
            logged = {signal: np.ones(len(table), bool) for signal in used if signal != STEP}
            logs.append(RawLog(path, title, numbers, logged, [], notes))
        else:
            labels = {signal: f"column '{names[place]}'" for signal, place in used.items()}
            problems: list[Problem] = []
            rows = _csv_rows(path, begin, len(names), used, title is not None, problems)
            logs.append(parse_rows(path, title, labels, rows, problems, notes))
    if not logs:
        raise TraceError(reasons[0])
    logs[0].notes.extend(f"{path}: {reason}" for reason in reasons)
    return logs


def _read_header(path: str) -> tuple[list[str], int]:
    """Returns the names of the columns, and the number of lines up to the header.

    Raises TraceError if the first line that is not blank is not a header.
    """
    with open_text(path) as file:
        number, line = next((at, line) for at, line in enumerate(file, 1) if line.strip())
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


def _find_runs(names: list[str]) -> dict[str | None, list[int]]:
    """Finds the places of each run's columns, including shared columns.

    Returns one run, None, for a table that is not an exported chart.
    """
    shared: list[int] = []
    runs: dict[str | None, list[int]] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            plain = normalize(name)
            if not (is_step(name) or plain in _SHARED_NAMES or plain.endswith("epoch")):
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
    return table if table.shape[1] == width else None


def _csv_rows(
    path: str,
    begin: int,
    width: int,
    places: Mapping[str, int],
    shared: bool,
    problems: list[Problem],
) -> Iterator[tuple[int, list[str]]]:
    """Yields the last line and the cells of every row at the `places`; adds damage to the problems.

    In a `shared` table, rows without a signal are skipped, because they belong to other runs. csv
    ends a cell after 131,072 characters, so that an open quote does not join the rest of the file
    to one row.
    """
    signals = [place for name, place in places.items() if name != STEP]
    with open_text(path) as file:
        rows = csv.reader(itertools.islice(file, begin, None))
        while True:
            try:
                cells = next(rows)
            except StopIteration:
                return
            except csv.Error as error:
                problems.append((begin + rows.line_num, f"{error}: the row is skipped"))
                continue
            line = begin + rows.line_num
            if not cells or (len(cells) == 1 and not cells[0].strip()):
                continue  # a blank line is no row
            if len(cells) < width or any(cells[width:]):
                plural = "s" if len(cells) > 1 else ""
                text = f"{len(cells)} cell{plural} where the header has {width}"
                problems.append((line, f"{text}: the row is skipped"))
            elif not shared or any(cells[place] for place in signals):
                yield line, [cells[place] for place in places.values()]
