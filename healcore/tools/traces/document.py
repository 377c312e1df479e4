"""One large JSON document that holds a list of records, read without holding the document.

`trainer_state.json` of Hugging Face's Trainer is an object with the records in "log_history"; a
plain list of records is read as well. json parses the records one by one out of a sliding window.
ijson would do the same and is kept well, but it would be one more dependency of every installation
for a single file kind, and it stops at the first damage.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, TextIO

from healcore.tools.traces.cells import shown
from healcore.tools.traces.findings import Findings
from healcore.tools.traces.jsonl import LONG, shortened
from healcore.tools.traces.text import BROKEN, open_text, why_broken

LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_BLOCK = 1 << 16
_LONGEST = 1 << 24
_GAP = re.compile(r"[\s,]*")


class _Window:
    """A piece of the text, and the line of the place up to which its lines are counted."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self.text = ""
        self.line = 1
        self._counted = 0

    def more(self) -> bool:
        block = self._file.read(max(_BLOCK, len(self.text)))  # doubling: long records stay cheap
        self.text += block
        return bool(block)

    def count_to(self, place: int) -> None:
        self.line += self.text.count("\n", self._counted, place)
        self._counted = place

    def drop(self, count: int) -> None:
        self.count_to(count)
        self.text = self.text[count:]
        self._counted = 0


def objects(path: str, findings: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every record with the line on which it begins. Damage ends the reading, and is told."""
    with open_text(path) as file:
        window = _Window(file)
        try:
            if _into_list(window):
                yield from _records(path, window, findings)
        except BROKEN as error:
            findings.problem(path, window.line, why_broken(error))


def _into_list(window: _Window) -> bool:
    """Moves to behind the bracket that opens the list."""
    window.more()
    found = re.match(r"\s*\[", window.text)
    while True:
        found = found or LOG_HISTORY.search(window.text)
        if found:
            window.drop(found.end())
            return True
        window.drop(max(0, len(window.text) - 64))
        if not window.more():
            return False


def _records(
    path: str, window: _Window, findings: Findings
) -> Iterator[tuple[int, dict[str, Any]]]:
    decode = json.JSONDecoder().raw_decode
    at = 0
    while True:
        gap = _GAP.match(window.text, at)
        at = gap.end() if gap else at
        if at > _BLOCK:
            window.drop(at)
            at = 0
        if window.text.startswith("]", at):
            return
        try:
            value, end = decode(window.text, at)
        except (ValueError, RecursionError):
            window.drop(at)
            at = 0
            if len(window.text) < _LONGEST and window.more():
                continue
            rest = shown(window.text) if window.text else "the end of the file"
            text = f"the document breaks off at {rest}: what follows is lost"
            findings.problem(path, window.line, text)
            return
        window.count_to(at)
        start, at = at, end
        if isinstance(value, dict):
            yield window.line, value if end - start < LONG else shortened(value)
        else:
            findings.problem(path, window.line, f"not a record: {shown(str(value))}: left out")
