"""Modules that keep functions among their leaves, as Equinox's do: the errors, and a whole loop."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import healcore
from healcore.jax import HealStateError, heal_zclip, protect

ROOT = Path(__file__).parents[2]


@jax.tree_util.register_dataclass
@dataclass
class Layer:
    weight: Any
    activation: Any


def layer() -> Layer:
    return Layer(jnp.ones((3, 1)), jax.nn.relu)


@pytest.mark.parametrize("tx", [protect(optax.sgd(0.1), "zclip"), heal_zclip()])
def test_a_function_among_the_parameters_is_named(tx):
    found = r"params\['a'\]\.activation is a \w+, not .* `tx\.init\(eqx\.filter\(model, eqx\."
    with pytest.raises(HealStateError, match=found):
        tx.init({"a": layer()})


def test_a_function_in_the_state_is_named():
    tx = protect(optax.sgd(0.1), "zclip")
    state = {"model": layer(), "opt_state": tx.init({"weight": jnp.ones((3, 1))})}
    found = r"state\['model'\]\.activation is a \w+, not .*eqx\.partition\(model, eqx\."
    with (
        pytest.raises(HealStateError, match=found),
        healcore.Healer("zclip", state=state),
    ):
        pass


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
