"""Writes the tables of docs/events.md from the schema: `python -m tests.events.page_tables`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from healcore.events.schema import KINDS

PAGE = Path(__file__).parents[2] / "docs" / "events.md"
BEGIN = "<!-- {name}: begin (written by python -m tests.events.page_tables) -->"
END = "<!-- {name}: end -->"
JUDGED = " `step` is the step that was judged."
"""A star stands for this sentence."""


def tables() -> Iterator[tuple[str, str]]:
    """Name and text of each table."""
    kinds = (f"`{name}` | {kind.about.replace(JUDGED, ' *')}" for name, kind in KINDS.items())
    yield "kinds", _table("kind | when; what `step` is", kinds)


def written(page: str) -> str:
    """The page with the tables of the present code, each between its two marks."""
    for name, table in tables():
        begin, end = BEGIN.format(name=name), END.format(name=name)
        assert page.count(begin) == page.count(end) == 1, name
        before, rest = page.split(begin)
        page = f"{before}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    return page


def _table(head: str, rows: Iterable[str]) -> str:
    return "\n".join((head, re.sub(r"[^|]+", "---", head), *rows))


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
