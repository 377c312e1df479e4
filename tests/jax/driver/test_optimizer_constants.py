"""A program that starts a completed run again with another optimizer is told so."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

from healcore import Healer
from healcore.errors import StoreNotEmpty
from healcore.jax import protect
from healcore.jax.driver.driver import JaxDriver
from tests.healer.run_directory import new_process


def warm_up(peak: float) -> Any:
    return optax.warmup_cosine_decay_schedule(0.0, peak, 10, 100)


OPTIMIZERS: Any = {
    "rate": optax.sgd,
    "schedule": lambda peak: optax.adamw(warm_up(peak)),
    "injected schedule": lambda peak: optax.inject_hyperparams(optax.adamw)(warm_up(peak)),
    "partition": lambda rate: optax.partition({"w": optax.adam(rate)}, {"w": "w"}),
    "accumulation": lambda rate: optax.MultiSteps(optax.adam(rate), 2),
}
PARAMS = {"w": jnp.ones(3)}


def constants(tx: Any, *, jitted: bool = False) -> Any:
    init = tx.init
    if jitted:
        init = jax.jit(init)
    settings = JaxDriver({"params": PARAMS, "opt": init(PARAMS)}).settings()
    (found,) = [value for name, value in settings.items() if name.startswith("constants of opt (")]
    return found


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_closed_over_number_is_a_setting(name):
    one, same, other = (
        constants(protect(OPTIMIZERS[name](rate)), jitted=rate == 0.25)
        for rate in (0.125, 0.125, 0.25)
    )
    assert one == same
    assert 0.125 in map(abs, one)
    assert 0.25 in map(abs, other)
    assert one != other


def test_an_optimizer_that_needs_other_arguments_has_no_such_setting():
    inner = optax.GradientTransformationExtraArgs(
        optax.sgd(0.1).init, lambda updates, state, params, *, needed: (updates, state)
    )
    driver = JaxDriver({"params": PARAMS, "opt": protect(inner).init(PARAMS)})
    assert not [name for name in driver.settings() if name.startswith("constants")]


def test_a_completed_run_with_another_peak_is_not_loaded(tmp_path):
    def run(peak: float) -> Any:
        new_process()
        tx = protect(optax.sgd(warm_up(peak)))

        @jax.jit
        def step(state: Any) -> Any:
            updates, opt = tx.update(state["params"], state["opt"], value=jnp.float32(1.0))
            return {"params": optax.apply_updates(state["params"], updates), "opt": opt}

        with Healer(state={"params": PARAMS, "opt": tx.init(PARAMS)}, store=tmp_path) as healer:
            for _ in healer.steps(4):
                healer.update(step(healer.state))
        return healer.state["params"]["w"]

    final = run(0.125)
    with pytest.raises(StoreNotEmpty, match=r"constants of opt .*-0\.125.* -> .*-0\.25"):
        run(0.25)
    assert (run(0.125) == final).all()
