"""Every `file.py:name` in CONTRIBUTING exists, and every test that is said to be slow."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.conftest import SLOW

ROOT = Path(__file__).parents[2]


def defined(path: Path) -> set[str]:
    """Functions and classes of a file, methods as `Class.method` and as `method`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each.name for each in node.body if isinstance(each, ast.FunctionDef)]
            found |= {f"{node.name}.{name}" for name in methods}
    return found


def test_the_walks_name_what_is_there():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`((?:healcore|adapters)/[\w/]+\.py):([\w.]+)`", text)
    assert len(named) > 20
    missing = [f"{file}:{name}" for file, name in named if name not in defined(ROOT / file)]
    assert not missing


def test_the_slow_tests_are_there():
    for each in SLOW:
        file, _, name = each.partition("::")
        assert (ROOT / file).exists(), each
        assert not name or name.partition("[")[0] in defined(ROOT / file), each
