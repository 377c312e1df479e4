"""The examples in the docstrings of the core run as they are."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("module", ["array_namespace", "engine.engine", "numerics", "tape"])
def test_the_examples_run(module: str):
    done = doctest.testmod(importlib.import_module(f"healcore.core.{module}"))
    assert done.attempted > 0
    assert done.failed == 0
