"""The text of the pages, and the programs in it."""

import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def text(page: str) -> str:
    return (DOCS / page).read_text()


def blocks(page: str, language: str = "python") -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", text(page), flags=re.M | re.S)


def snippet(page: str, part: str) -> str:
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
