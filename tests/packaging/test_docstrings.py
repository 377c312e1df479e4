"""The examples of docstrings run."""

import doctest
import importlib
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted([*(ROOT / "adapters").rglob("*.py"), *(ROOT / "healcore").rglob("*.py")])
"""`rglob` does not follow links, so the files of the adapters are here once."""


def module_of(path: Path) -> str:
    """The name by which a file is imported: `adapters/jax` is installed as `healcore.jax`."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    if parts[0] == "adapters":
        parts[0] = "healcore"
    if parts[-1] == "__init__":
        parts.pop()
    return ".".join(parts)


WITH_EXAMPLES = [
    module_of(path) for path in FILES if re.search(r"^ *>>> ", path.read_text(), flags=re.M)
]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_the_examples_run(module: str):
    importlib.import_module(module)
    loaded = sys.modules[module]
    done = doctest.testmod(loaded)
    assert done.attempted > 0
    assert done.failed == 0
