"""The examples run out of memory in their first step, and train to the end in smaller parts."""

from __future__ import annotations

import importlib
import re

import pytest


@pytest.mark.parametrize("name", ["out_of_memory", "out_of_memory_jax"])
def test_example(name, capsys: pytest.CaptureFixture[str]):
    example = importlib.import_module(f"examples.{name}")
    example.main()
    match = re.fullmatch(r"loss (\S+), steps (\d+), largest part (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.45  # guessing the mean of sin() gives 0.5
    assert int(match[2]) == example.STEPS
    assert int(match[3]) == example.FITS
