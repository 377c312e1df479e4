"""The examples go back once, lose the bad batches and nothing else, and add five lines at most."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest


@pytest.mark.parametrize("name", ["optax_healer", "linen_healer", "nnx_healer"])
def test_example(name, tmp_path, capsys: pytest.CaptureFixture[str]):
    example = importlib.import_module(f"examples.{name}")
    assert inspect.getsource(example).count("# <- healcore") <= 5
    example.main(str(tmp_path))
    match = re.fullmatch(r"loss (\S+), steps (\d+), rollbacks 1\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.3  # guessing the mean of sin() gives 0.5
    lost = example.STEPS - int(match[2])
    assert 10 <= lost <= len(example.RUINED)
