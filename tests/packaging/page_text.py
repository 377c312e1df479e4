"""The text of the pages, and the programs in it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
HOLE = "…"
"""Stands for a value, in a quoted line of a page."""


def text(page: str) -> str:
    """A page of docs/, as it is written."""
    return (DOCS / page).read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    """The code blocks of a page, in one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.M | re.S)


def snippet(page: str, part: str) -> str:
    """The program of a page that contains `part`."""
    (found,) = [block for block in blocks(page) if part in block]
    return found


def whole_change(page: str) -> tuple[str, str]:
    """The program of a page before and after the change that its first diff shows."""
    diff = blocks(page, "diff")[0]
    lines = diff.splitlines(keepends=True)
    assert {line[0] for line in lines} == {" ", "+", "-"}
    before = [line[1:] for line in lines if line[0] != "+"]
    after = [line[1:] for line in lines if line[0] != "-"]
    return "".join(before), "".join(after)
