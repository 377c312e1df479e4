"""JSON Lines: one object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from healcore.tools.traces.cells import shown
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.text import BROKEN, open_text, why_broken

LONGEST = 1 << 24
"""Characters of the longest line that is read: what bounds the memory."""

LONG = 1 << 12
"""Characters of a record from which on it is shortened."""
_SMALL = frozenset((float, int, bool, type(None)))
_TOLD = 400
"""Characters of a value that is no number: a number written as text has fewer."""


def shortened(record: dict[str, Any], *, within: bool = False) -> dict[str, Any]:
    """A long record without what no reader reads: lists, and what is nested more than once.

    Thousands of records are in memory at a time, and a list of lists takes twenty times its text.
    """
    short: dict[str, Any] = {}
    for key, value in record.items():
        if type(value) is dict and not within:
            short[key] = shortened(value, within=True)
        elif type(value) in _SMALL:
            short[key] = value
        else:
            short[key] = value[:_TOLD] if type(value) is str else f"a {type(value).__name__}"
    return short


def objects(path: str, findings: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every object of the file with its line number. Damaged lines are told and left out."""
    decode = json.JSONDecoder().raw_decode
    with open_text(path) as file:
        number = 0
        while True:
            number += 1
            try:
                line = file.readline(LONGEST)
                if len(line) == LONGEST:
                    findings.problem(path, number, "the line is longer than 16 MB: left out")
                    while line and not line.endswith("\n"):
                        line = file.readline(LONGEST)
                    continue
            except BROKEN as error:
                findings.problem(path, number, why_broken(error))
                return
            if not line:
                return
            text = line.strip()
            if not text:
                continue
            try:
                value, end = decode(text)
            except (ValueError, RecursionError):
                torn = "" if line.endswith(("\n", "\r")) else " (the last line is torn)"
                findings.problem(path, number, f"not JSON{torn}: {shown(text)}: left out")
                continue
            if end != len(text) or not isinstance(value, dict):
                what = "more than one JSON value" if end != len(text) else "not a JSON object"
                findings.problem(path, number, f"{what}: {shown(text)}: left out")
                continue
            yield number, value if len(text) < LONG else shortened(value)
