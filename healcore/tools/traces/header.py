"""The first line of a table: its delimiter and what the columns are."""

from __future__ import annotations

import csv
from typing import NamedTuple

from healcore.tools.traces.cells import from_text
from healcore.tools.traces.names import STEP, TIERS, plain
from healcore.tools.traces.text import open_text
from healcore.tools.traces.trace import TraceError

DELIMITERS = ",;\t"
LONGEST = 1 << 20
MOST_COLUMNS = 1 << 16
MOST_RUNS = 4096
"""Of one export: each is a pass over the file."""
_BESIDE = ("wall_time", "relative_time_process", "relative_time_wall", "created", "timestamp")


class Header(NamedTuple):
    """The columns of a table."""

    names: list[str]
    delimiter: str
    line: int
    """Its line number, from 1: blank lines may come before it."""


def read_header(path: str) -> Header:
    """Finds the header.

    Raises:
        TraceError: there is none.
    """
    with open_text(path) as file:
        line, number = "", 0
        while not line.strip():
            line, number = file.readline(LONGEST), number + 1
            if not line:
                raise TraceError("it is empty")
    if len(line) == LONGEST:
        raise TraceError("its first line has no end within a megabyte: this is not a table")
    try:
        read = {sign: next(csv.reader([line], delimiter=sign)) for sign in DELIMITERS}
    except csv.Error as error:  # a cell of more than 131,072 characters
        raise TraceError(f"its first line cannot be read ({error}): this is not a table") from None
    delimiter = max(read, key=lambda sign: len(read[sign]))
    cells = read[delimiter]
    if len(cells) > MOST_COLUMNS:
        raise TraceError(f"it has {len(cells):,} columns. At most {MOST_COLUMNS:,} are read")
    names = [cell.strip() for cell in cells]
    if all(_is_number(name) for name in names):
        raise TraceError(
            f"its first line is data, not a header: '{line.strip()[:60]}'. Write the names of the "
            "columns above it: step,loss,grad_norm"
        )
    return Header(names, delimiter, number)


def runs_of(names: list[str]) -> dict[str, dict[str, int]] | None:
    """The runs of a chart that was exported from Weights & Biases, or None for any other table.

    Such a table has one column for the steps, and for every run "RUN - METRIC" with its extremes
    over a bin in "RUN - METRIC__MIN" and "RUN - METRIC__MAX", which nobody needs here.

    Returns:
        For every run the columns that are its own or common to all: metric -> place.

    Raises:
        TraceError: it has more runs than are read.
    """
    common: dict[str, int] = {}
    runs: dict[str, dict[str, int]] = {}
    copies: dict[str, int] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            if not _may_be_common(name):
                return None
            common[name] = place
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            copies[name] = copy = copies.get(name, 0) + 1
            title = run if copy == 1 else f"{run} ({copy})"  # two runs of one name
            runs.setdefault(title, {}).setdefault(metric, place)
    if len(runs) > MOST_RUNS or len(runs) * len(common) > 1 << 20:
        raise TraceError(f"it has {len(runs):,} runs. At most {MOST_RUNS:,} are read")
    return {run: {**common, **own} for run, own in runs.items()} if runs else None


def _may_be_common(name: str) -> bool:
    known = {fit for tier in TIERS[STEP] for fit in tier}
    return plain(name) in known or plain(name) in _BESIDE or plain(name).endswith("epoch")


def _is_number(cell: str) -> bool:
    try:
        return from_text(cell) is not None
    except ValueError:
        return False
