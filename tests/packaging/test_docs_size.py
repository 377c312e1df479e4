"""The length of the documentation: a limit for each page and for all of them (CONTRIBUTING.md)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_PAGE, IN_ALL = 2500, 32_000
MEASURED = ("demo", "goodput", "gpu", "healbench")
"""Pages with tables that a benchmark writes, without marks: no table counts."""
GENERATED = re.compile(
    r"<!-- ?([\w-]+): begin.*?-->.*?<!-- ?\1: end ?-->|^<!--=[\w.-]+-->\n.*?<!--/-->", re.S | re.M
)
"""A generated part of a page, between its two marks."""
PAGES = [
    ROOT / "README.md",
    *(
        path
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if ROOT / "docs" / "api" not in path.parents
    ),
]


def count(text: str, *, tables: bool = True) -> int:
    """Words without generated parts; with or without tables. A word has a letter or a digit."""
    lines = GENERATED.sub("", text).splitlines()
    kept = [line for line in lines if tables or not line.lstrip().startswith("|")]
    return sum(bool(re.search(r"\w", word)) for line in kept for word in line.split())


def words(path: Path) -> int:
    """Words of a page that a person has written."""
    return count(path.read_text(), tables=path.stem not in MEASURED)


def test_generated_parts_do_not_count():
    page = "two words\n<!-- keys: begin (written by me) -->\n| a | b |\n<!-- keys: end -->\n| c |\n"
    assert count(page) == 3
    assert count(page, tables=False) == 2


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_short(path):
    assert words(path) <= PER_PAGE, f"{path.name}: split it, or leave out what stands elsewhere"


def test_all_pages_together_are_short():
    found = {str(path.relative_to(ROOT)): words(path) for path in PAGES}
    longest = sorted(found, key=lambda name: found[name], reverse=True)[:5]
    assert sum(found.values()) <= IN_ALL, f"the longest: {longest}"
