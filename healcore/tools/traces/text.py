"""Opens text files, and collects their numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping
from typing import Any, TextIO

import numpy as np

from healcore import regular_file
from healcore.tools.traces.attempts import Log
from healcore.tools.traces.columns import STEP, Findings

_HEAD_BYTES = 1 << 20
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""


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


class RowCollector:
    """Collects the numbers of a file's rows, and the problems of its cells.

    Args:
        path: the file.
        labels: what messages call each column, by signal and "step", if the file has steps.
        findings: collects the problems.
    """

    def __init__(self, path: str, labels: Mapping[str, str], findings: Findings) -> None:
        self._path, self._labels, self._findings = path, labels, findings
        self._line, self._index = array("q"), array("q")
        self._numbers = {name: array("d") for name in labels}
        self._logged = {name: bytearray() for name in labels if name != STEP}

    def add(self, cells: Iterable[Any], line: int, index: int = -1) -> None:
        """Adds a row of cells or JSON values in the order of the labels, unless it has no step."""
        numbers: list[float | None] = []
        is_row = True
        for (name, label), cell in zip(self._labels.items(), cells, strict=True):
            number: float | None = None
            problem: object = None
            try:
                number = parse_number(cell)
            except ValueError as error:
                problem = error
            effect = f"read without {name}"
            if name == STEP and (number is None or not math.isfinite(number)):
                is_row, effect = False, "skipped"
                problem = problem or ("missing" if number is None else number)
            if problem is not None:
                self._findings.problem(self._path, line, f"{label}: {problem}: the row is {effect}")
            numbers.append(number)
        if is_row:
            self._line.append(line)
            self._index.append(index)
            for name, number in zip(self._labels, numbers, strict=True):
                self._numbers[name].append(math.nan if number is None else number)
                if name != STEP:
                    self._logged[name].append(number is not None)

    def log(self, run: str | None = None, count: int | None = None) -> Log:
        """Returns the rows of the file.

        `count` is the number of rows of the file, or None if rows are numbered after they are
        merged.
        """
        return Log(
            self._path,
            run,
            {name: np.array(column) for name, column in self._numbers.items()},
            {name: np.array(mask, bool) for name, mask in self._logged.items()},
            np.array(self._line),
            self._findings,
            None if count is None else np.array(self._index),
            count or 0,
        )
