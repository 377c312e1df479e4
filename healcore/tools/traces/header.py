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
    cells = max((next(csv.reader([line], delimiter=sign)) for sign in DELIMITERS), key=len)
    delimiter = next(
        sign for sign in DELIMITERS if next(csv.reader([line], delimiter=sign)) == cells
    )
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
    """
    common: dict[str, int] = {}
    runs: dict[str, dict[str, int]] = {}
    for place, name in enumerate(names):
        run, dash, metric = name.rpartition(" - ")
        if not dash:
            if not _may_be_common(name):
                return None
            common[name] = place
        elif not metric.endswith(("__MIN", "__MAX")) and metric not in ("_step", "_timestamp"):
            copy, title = 1, run
            while metric in runs.get(title, {}):  # two runs of one name
                copy += 1
                title = f"{run} ({copy})"
            runs.setdefault(title, {})[metric] = place
    return {run: {**common, **own} for run, own in runs.items()} if runs else None


def _may_be_common(name: str) -> bool:
    known = {fit for tier in TIERS[STEP] for fit in tier}
    return plain(name) in known or plain(name) in _BESIDE or plain(name).endswith("epoch")


def _is_number(cell: str) -> bool:
    try:
        return from_text(cell) is not None
    except ValueError:
        return False
