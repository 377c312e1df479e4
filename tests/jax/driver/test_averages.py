"""Averages, momentum encoders and teachers in the state are not replaced by earlier ones."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from healcore import Healer
from healcore.jax import protect
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.driver.weights import averages, rivals
from healcore.runtime.dominance import evidence
from tests.healer.run_options import grouped
from tests.jax.driver.test_damage_or_data import data, initial, loss_of, reversed_layer

TX = protect(optax.adam(1e-2), "default")
STEPS, CHANGE = 300, 200


@pytest.fixture(autouse=True)
def free_comparisons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Comparisons take no time, so their distance does not depend on the load of the machine."""
    monkeypatch.setattr(evidence, "time", SimpleNamespace(monotonic=lambda: 5.0))


@jax.jit
def step(state: Any, batch: Any) -> Any:
    teacher, params, average, opt = state
    loss, grads = jax.value_and_grad(lambda p: loss_of(p, batch))(params)
    updates, opt = TX.update(grads, opt, params, value=loss)
    params = optax.apply_updates(params, updates)
    return teacher, params, optax.incremental_update(params, average, 0.01), opt


@jax.jit
def loss_fn(state: Any, batch: Any) -> Any:
    _, params, average, _ = state
    drift = sum(jnp.square(params[name] - average[name]).sum() for name in params)
    return loss_of(params, batch) + 1e-3 * drift


def train(folder: Path, *, compares: bool, damaged: bool = False) -> tuple[Healer, Any]:
    params = initial()
    state = (params, params, jax.tree.map(jnp.copy, params), TX.init(params))
    options = {"loss_fn": loss_fn if compares else None, "save_every": 50}
    with Healer("default", state=state, **grouped(options, events=folder / "e.jsonl")) as healer:
        for batch in healer.batches([data(number) for number in range(STEPS)]):
            state = healer.state
            if damaged and healer.step == CHANGE and not healer.rollbacks:
                state = (state[0], reversed_layer(state[1]), *state[2:])
            healer.update(step(state, batch))
    return healer, healer.state


def test_a_run_with_an_average_ends_as_without_comparisons(tmp_path):
    _, plain = train(tmp_path / "plain", compares=False)
    healer, compared = train(tmp_path / "compared", compares=True)
    assert healer.rollbacks == 0
    jax.tree.map(np.testing.assert_array_equal, plain, compared)
    comparison: Any = healer._loop.recovery.dominance
    assert comparison._budget._prices, "weights were compared"
    assert set(comparison.anchors[-1].weights) == {"[1]['a']", "[1]['b']"}


def test_damage_is_found_next_to_an_average_and_a_teacher(tmp_path):
    healer, _ = train(tmp_path, compares=True, damaged=True)
    assert healer.rollbacks == 1


def test_an_earlier_copy_replaces_the_trained_parameters_only():
    params = initial()
    state: Any = (params, params, jax.tree.map(jnp.copy, params), TX.init(params))
    driver = JaxDriver(state, "default")
    weights = driver.copy_weights()
    norms = lambda state, batch: state[batch]["a"][0, 0]  # noqa: E731
    assert driver.losses_of(norms, [0, 1, 2], weights) == [float(params["a"][0, 0])] * 3
    for number in range(10):
        driver.update(state := step(state, data(number)))
    current = driver.losses_of(norms, [0, 1, 2])
    earlier = driver.losses_of(norms, [0, 1, 2], weights)
    assert earlier == [current[0], float(params["a"][0, 0]), current[2]]
    assert current[1] != earlier[1]
    assert set(driver.copy_weights()) == {"[1]['a']", "[1]['b']"}


# -- which part is trained ------------------------------------------------------------------------


def moved(decay: float, *, before: int, rate: float = 0.999) -> tuple[Any, Any]:
    """Parameters and their average, before and after 20 steps, late in a run with a decaying rate.

    The average moves farther than the parameters.
    """
    random = np.random.default_rng(0)
    start = random.standard_normal(200)
    found: dict[str, Any] = {"params": start, "average": start}
    kept = found
    for number in range(before + 20):
        if number == before:
            kept = dict(found)
        params = found["params"] - 0.1 * rate**number * (1 + random.standard_normal(200))
        average = decay * found["average"] + (1 - decay) * params
        found = {"params": params, "average": average}
    return kept, found


@pytest.mark.parametrize("before", [0, 300, 3_000])
@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.9999])
def test_an_average_follows_the_parameters(decay, before):
    candidates = [[("average",), ("params",)]]
    earlier, now = moved(decay, before=before)
    found = averages(rivals(candidates, now), earlier, now)
    assert found == (None if decay == 0 else {"average"})


def test_two_networks_and_an_average_of_one():
    first, second = moved(0.99, before=50), moved(0.99, before=70, rate=1.0)
    earlier, now = (
        {"g": one["params"], "average": one["average"], "d": -other["params"]}
        for one, other in zip(first, second, strict=True)
    )
    parts = [("g",), ("average",), ("d",)]
    assert averages(rivals([parts, parts], now), earlier, now) == {"average"}


def test_parts_are_rivals_only_if_all_their_tensors_have_the_same_shapes():
    tensors = {"a": np.ones(3), "b": np.ones(3), "mean": np.ones(2)}
    assert not rivals([[("a",), ("mean",)]], tensors)
    assert not rivals([[("a",), ("b",)]] * 2, tensors)
    assert rivals([[("a",), ("b",), ("mean",)]], tensors) == [([("a",), ("b",)], 1)]
