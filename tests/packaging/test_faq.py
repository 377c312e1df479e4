"""docs/faq.md quotes messages that occur in the source."""

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
ROWS = [line for line in SECTION.splitlines() if line.startswith("`")]


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


@pytest.mark.parametrize("message", quoted())
def test_each_quoted_message_occurs_in_the_source(message: str):
    assert len(message.replace(HOLE, "")) >= 12
    assert message in source()
