"""The examples are rolled back and train to the end."""

import importlib
import inspect
import re
from typing import Any

import pytest

pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES: dict[str, tuple[float, str]] = {
    "torch_healer": (0.45, "torch"),
    "accelerate_loop": (0.45, "accelerate"),
    "lightning_trainer": (0.45, "lightning"),
    "fabric_loop": (0.7, "lightning"),
    "self_healing_trainer": (2.5, "transformers"),
    "optax_healer": (0.45, "optax"),
    "linen_healer": (0.45, "flax"),
    "nnx_healer": (0.45, "flax"),
}
"""Example -> an upper bound of the healed loss (a guess has 0.5, or 3.4 for words), its needs."""
ADDED = {"optax_healer": 5, "linen_healer": 8, "nnx_healer": 5}
"""Most lines that healcore adds to a program."""


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str, tmp_path: Any, capsys: pytest.CaptureFixture[str]):
    most, needed = EXAMPLES[name]
    pytest.importorskip(needed)
    example = importlib.import_module(f"examples.{name}")
    example.main(str(tmp_path))
    steps = getattr(example, "STEPS", 0) or example.EPOCHS * example.BATCHES
    # The rate was at fault: no batch is left out.
    last = rf"^loss (\S+), steps {steps}, rollbacks [1-9]\d*$"
    match = re.search(last, capsys.readouterr().out, re.MULTILINE)
    assert match
    assert float(match[1]) < most
    if name in ADDED:
        assert inspect.getsource(example).count("# <- healcore") <= ADDED[name]


@pytest.mark.parametrize("name", ["out_of_memory", "out_of_memory_jax"])
def test_memory_that_runs_out_in_the_first_step(name: str, capsys: pytest.CaptureFixture[str]):
    example = importlib.import_module(f"examples.{name}")
    example.main()
    match = re.fullmatch(r"loss (\S+), steps (\d+), largest part (\d+)\n", capsys.readouterr().out)
    assert match
    assert float(match[1]) < 0.45
    assert (int(match[2]), int(match[3])) == (example.STEPS, example.FITS)
