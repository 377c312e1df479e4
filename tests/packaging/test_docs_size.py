"""The length of the documentation: a limit for each page and for all of them (CONTRIBUTING.md)."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PER_PAGE, IN_ALL = 2500, 32_000
GENERATED = ("demo", "goodput", "gpu", "healbench", "numbers")
"""Pages with tables that a benchmark writes: only their text counts."""
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def words(path: Path) -> int:
    """Words as `wc -w` counts them, without the tables of a generated page."""
    lines = path.read_text().splitlines()
    if path.stem in GENERATED:
        lines = [line for line in lines if not line.lstrip().startswith("|")]
    return sum(len(line.split()) for line in lines)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_is_short(path):
    assert words(path) <= PER_PAGE, f"{path.name}: split it, or leave out what stands elsewhere"


def test_all_pages_together_are_short():
    found = {str(path.relative_to(ROOT)): words(path) for path in PAGES}
    longest = sorted(found, key=lambda name: found[name], reverse=True)[:5]
    assert sum(found.values()) <= IN_ALL, f"the longest: {longest}"
