"""The modules that importing healcore loads, in an interpreter of its own."""

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


FRAMEWORKS = ("jax", "jaxlib", "torch", "optax", "flax", "matplotlib")


def test_what_an_import_does_not_load():
    absent = ("numpy", "pydantic", "rich", *FRAMEWORKS)
    assert run(f"import sys, healcore; print(set({absent}) & set(sys.modules))") == "set()"
    rest = "healcore.policy, healcore.core.engine, healcore.tools.cli"
    assert run(f"import sys, {rest}; print(set({FRAMEWORKS}) & set(sys.modules))") == "set()"


@pytest.mark.slow
def test_an_import_leaves_the_filters_of_warnings_alone():
    code = "import warnings, torch.distributed.checkpoint; before = [*warnings.filters]"
    assert run(f"{code}; import healcore.torch.store; print(warnings.filters == before)") == "True"


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
