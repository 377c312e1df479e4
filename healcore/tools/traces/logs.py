"""Defines logs: the rows of one file as columns. Opens text files, and parses their cells."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

import numpy as np

from healcore import regular_file
from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "update_norm", "eval_loss")
"""Columns that are read from a log: signals of `healcore.core.signals`."""

STEP = "step"

JUDGED = ("loss", "grad_norm")
"""A row can be judged if it has one of these. Only these show where a run was resumed."""

KNOWN_FORMATS = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, the console "
    "output of a Trainer, a TensorBoard event file, or healcore's own metrics"
)
_HEAD_BYTES = 1 << 20
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy."""


Problem = tuple[int, str]
"""Unusable content: its line from 1, or 0 in a format without lines, and a description."""


class RawLog(NamedTuple):
    """The rows of one file, or of one run in a file, as written."""

    path: str
    run: str | None
    """Name of the run in a file with several runs, or None."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal and "step", if the file has steps, which are finite."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[Problem]
    notes: list[str]
    """Remarks about usable content, each with the path."""


def read_head(path: str) -> bytes:
    """Returns the first megabyte of the content. Raises OSError."""
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(_HEAD_BYTES)


def open_text(path: str) -> TextIO:
    """Opens a file as UTF-8, with unchanged line ends. Invalid bytes become U+FFFD."""
    return open(
        path, encoding="utf-8-sig", errors="replace", newline="", opener=regular_file.opener
    )


def parse_number(value: Any) -> float | None:
    """Parses a cell or JSON value; returns None for no value. Raises ValueError for other text."""
    if value is None or type(value) is float:
        return value
    if isinstance(value, str):
        try:
            if "_" not in value:  # float() would accept 1_000, which is Python syntax
                return float(value)
        except ValueError:
            pass
        if value.strip().lower() in _NOT_LOGGED:
            return None
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            return math.inf if value > 0 else -math.inf
    raise ValueError(f"{quote_excerpt(str(value))} is not a number")


def quote_excerpt(text: str) -> str:
    """Quotes the start of a damaged text."""
    return repr(text if len(text) <= 40 else f"{text[:37]}...")


def parse_rows(
    path: str,
    run: str | None,
    labels: Mapping[str, str],
    rows: Iterable[tuple[int, Sequence[Any]]],
    problems: list[Problem],
    notes: list[str],
) -> RawLog:
    """Parses the cells of a file, and adds damaged cells to its problems.

    Args:
        path: the file.
        run: name of the run in a file with several runs, or None.
        labels: what problems call each column, by signal and "step", if the file has steps.
        rows: line and cells or JSON values of each row, in the order of the labels. A row without
            a finite step is skipped.
        problems: unusable content found so far.
        notes: remarks about usable content.
    """
    columns = {name: array("d") for name in labels}
    logged = {name: bytearray() for name in labels if name != STEP}
    for line, cells in rows:
        numbers: list[float | None] = []
        for (name, label), cell in zip(labels.items(), cells, strict=True):
            number: float | None = None
            problem: object = None
            try:
                number = parse_number(cell)
            except ValueError as error:
                problem = error
            if name == STEP and (number is None or not math.isfinite(number)):
                problem = problem or ("missing" if number is None else number)
                problems.append((line, f"{label}: {problem}: the row is skipped"))
                break
            if problem:
                problems.append((line, f"{label}: {problem}: the row is read without {name}"))
            numbers.append(number)
        else:
            for name, number in zip(labels, numbers, strict=True):
                columns[name].append(math.nan if number is None else number)
                if name != STEP:
                    logged[name].append(number is not None)
    return RawLog(
        path,
        run,
        {name: np.array(column) for name, column in columns.items()},
        {name: np.array(mask, bool) for name, mask in logged.items()},
        problems,
        notes,
    )
