"""A loop with an Equinox module, which keeps functions among its leaves."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).parents[2]


def test_the_loop_of_the_page_runs_with_equinox(tmp_path, monkeypatch):
    pytest.importorskip("equinox")
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs/jax.md").read_text()
    optimizer, loop, *others = re.findall(r"```python\n(.*?)```", page, re.S)
    (module,) = (each for each in others if "eqx." in each)
    scope: dict[str, Any] = {}
    for code in (optimizer, module, loop):
        exec(code, scope)
    assert scope["healer"].step == 50
    model = scope["eqx"].combine(scope["healer"].state[0], scope["static"])
    assert isinstance(model.layers[0].weight, jax.Array)
    assert not jnp.array_equal(model.layers[0].weight, scope["model"].layers[0].weight)
