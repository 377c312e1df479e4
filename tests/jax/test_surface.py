"""The public names, the modules that the import loads, and the loop of the page."""

import doctest
import inspect
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import healcore.jax as hj
from tests.packaging.test_light_import import run


def test_every_public_name_is_documented():
    assert hj.__all__ == sorted(hj.__all__)
    assert all(inspect.getdoc(getattr(hj, name)) for name in hj.__all__)


@pytest.mark.parametrize("module", ["commit", "transform"])
def test_the_examples_in_the_docstrings_run(module):
    # From sys.modules: the function `commit` hides its module.
    done = doctest.testmod(sys.modules[f"healcore.jax.{module}"])
    assert done.attempted
    assert not done.failed


def test_importing_needs_neither_flax_nor_pydantic():
    done = run(
        "import sys, healcore.jax; print(sys.modules.keys() & {'flax','pydantic','torch','orbax'})"
    )
    assert done == "set()"


def test_the_loop_of_the_page_runs_with_equinox(tmp_path, monkeypatch):
    """A module of Equinox keeps functions among its leaves."""
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    page = (Path(__file__).parents[2] / "docs/jax.md").read_text()
    optimizer, loop, *others = re.findall(r"```python\n(.*?)```", page, re.S)
    (module,) = (each for each in others if "eqx." in each)
    scope: dict = {}
    for code in (optimizer, module, loop):
        exec(code, scope)
    assert scope["healer"].step == 50
    model = scope["eqx"].combine(scope["healer"].state[0], scope["static"])
    assert isinstance(model.layers[0].weight, jax.Array)
    assert not jnp.array_equal(model.layers[0].weight, scope["model"].layers[0].weight)
