"""The public names, and the modules and output of the import."""

import doctest
import inspect
import sys

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
