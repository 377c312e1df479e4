"""Each test that tests/README.md names for a feature exists."""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).parents[1]
PAGE = (TESTS / "README.md").read_text()
ROWS = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE, re.M)
TEST = re.compile(r"`tests/([\w/]+\.py)::(?:(\w+)::)?(test_\w+)`")


def exists(file: str, group: str, name: str) -> bool:
    """Whether a file has a test of this name, in this class if one is named."""
    path = TESTS / file
    text = path.read_text() if path.is_file() else ""
    if group:
        text = text.partition(f"\nclass {group}")[2].partition("\nclass ")[0]
    return bool(re.search(rf"^ *def {name}\(", text, re.M))


def test_every_named_test_exists():
    named = [each for _, cell in ROWS for each in TEST.findall(cell)]
    assert len(named) > 100
    assert [each for each in named if not exists(*each)] == []


def test_every_feature_has_a_test_or_says_so():
    other = [feature for feature, cell in ROWS if not TEST.search(cell)]
    others = ("test", "---", "no test", "not built", "`make")
    cells = dict(ROWS)
    assert [each for each in other if not cells[each].startswith(others)] == []
