"""The modules that importing healcore loads, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def run(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["healcore", "healcore.policy", "healcore.core.engine", "healcore.tools.cli", "healcore.demo"],
)
def test_no_framework_is_imported(module):
    heavy = "('jax', 'jaxlib', 'torch', 'optax', 'flax', 'matplotlib')"
    code = f"import sys, {module}; print([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]"


def test_import_healcore_is_almost_free():
    heavy = "('numpy', 'pydantic', 'rich')"
    code = f"import sys, healcore; print([m for m in {heavy} if m in sys.modules])"
    assert run(code) == "[]"


@pytest.mark.parametrize(
    ("extra", "hidden"), [("jax", "jax"), ("jax", "optax"), ("torch", "torch")]
)
def test_a_missing_framework_names_the_extra(extra, hidden):
    # A finder that does not find the framework, as find_spec and import in a bare venv.
    code = f"""
import importlib.abc, importlib.machinery, importlib.util, sys
real = importlib.machinery.PathFinder.find_spec
def find_spec(name, path=None, target=None):
    return None if name.split(".")[0] == {hidden!r} else real(name, path, target)
importlib.machinery.PathFinder.find_spec = staticmethod(find_spec)
import healcore
try:
    healcore.{extra}
except ImportError as error:
    print(error)
"""
    message = run(code)
    assert f"pip install '.[{extra}]'" in message
    assert hidden in message
