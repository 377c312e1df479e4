"""docs/faq.md quotes messages that occur in the source, and its links resolve."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "faq.md"
HOLE = "…"
"""Stands for a value, in the page and in the collected f-strings."""

SECTION = PAGE.read_text().partition("## By message")[2].partition("\n## ")[0]
ROWS = [line for line in SECTION.splitlines() if line.startswith("| `")]


def quoted() -> list[str]:
    """The quoted messages: the first column of the tables."""
    return [re.findall(r"`([^`]+)`", row.split(" | ")[0])[0] for row in ROWS]


def strings(tree: ast.AST) -> Iterator[str]:
    """The string constants of a file without docstrings. A value in an f-string is a HOLE."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            continue
        if isinstance(node, ast.JoinedStr):
            yield "".join(
                str(part.value) if isinstance(part, ast.Constant) else HOLE for part in node.values
            )
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        yield from strings(node)


@cache
def source() -> str:
    """All strings of the package, one per line."""
    # healcore/torch and healcore/jax are links to adapters.
    files = [path for root in ("healcore", "adapters") for path in (ROOT / root).rglob("*.py")]
    found = dict.fromkeys(each for path in files for each in strings(ast.parse(path.read_text())))
    return "\n".join(found)


def test_the_page_has_messages():
    assert len(ROWS) >= 35
    assert all(row.count(" | ") == 2 for row in ROWS)


@pytest.mark.parametrize("message", quoted())
def test_each_quoted_message_occurs_in_the_source(message: str):
    assert len(message.replace(HOLE, "")) >= 12
    assert message in source()


def anchors(page: Path) -> set[str]:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, flags=re.M)
    plain = [re.sub(r"[^\w\s-]", "", heading).strip().lower() for heading in headings]
    return {re.sub(r"[-\s]+", "-", heading) for heading in plain}


def test_each_link_resolves():
    links = re.findall(r"\]\(([^)]+)\)", PAGE.read_text())
    assert len(links) >= 20
    for link in links:
        file, _, anchor = link.partition("#")
        target = PAGE.parent / file
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link
