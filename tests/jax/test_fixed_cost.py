"""The fixed cost of a step: arrays in the state, operations of the engine, the Healer's own work.

Counted, not timed. A state of 108 scalars made a tiny step four times as slow, and an engine whose
scalars XLA copied into everything that depends on them took seconds to compile.
"""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

import functools
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import healcore
from healcore import policy
from healcore.jax import heal_zclip, protect
from healcore.jax.driver import dispatch
from tests.jax import policies

PARAMS = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
RESETS = policies.CUT_LR._replace(lr=policies.CUT_LR.lr._replace(reset_moments=True))


@pytest.mark.parametrize("preset", ["default", "observe", "conservative", "aggressive", "zclip"])
def test_the_healing_part_is_a_few_arrays(preset):
    bare = len(jax.tree.leaves(optax.adamw(1e-3).init(PARAMS)))
    healed = len(jax.tree.leaves(protect(optax.adamw(1e-3), preset).init(PARAMS)))
    assert healed - bare <= 12


def test_the_default_engine_is_few_operations_in_few_kernels():
    engine = policy.load("default").engine()
    tx = protect(optax.sgd(1e-3), engine)
    update = jax.jit(lambda g, s, loss: tx.update(g, s, PARAMS, value=loss))
    compiled = update.lower(PARAMS, tx.init(PARAMS), jnp.float32(1.0)).compile()
    text = compiled.as_text()
    assert text is not None
    assert operations(compiled) < 1_500
    if jax.default_backend() == "cpu":
        entry = text[text.index("\nENTRY ") :]
        assert entry.count(" fusion(") + entry.count(" call(") < 35


def compiled_step(tx: Any, tensors: int) -> Any:
    """The compiled step, with donation, of a model with matrices of 256 KiB and as many vectors."""
    tx = optax.with_extra_args_support(tx)
    params = [jnp.zeros((256, 256)), jnp.zeros(256)] * (tensors // 2)

    def step(params: Any, state: Any, grads: Any, loss: Any) -> Any:
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    jitted = jax.jit(step, donate_argnums=(0, 1))
    return jitted.lower(params, jax.eval_shape(tx.init, params), params, jnp.float32(1.0)).compile()


def operations(compiled: Any) -> int:
    """Instructions of a compiled program, in all its kernels."""
    return len(re.findall(r"^\s+(?:ROOT )?\S+ = ", compiled.as_text(), re.MULTILINE))


@pytest.mark.parametrize(
    ("tx", "limit"),
    [
        (optax.chain(heal_zclip(), optax.adamw(1e-3)), 1.1),
        (protect(optax.adamw(1e-3), RESETS), 1.5),
    ],
    ids=["heal_zclip", "protect"],
)
def test_one_more_tensor_costs_about_what_it_costs_with_a_clip(tx, limit):
    def each(tx: Any) -> float:
        return (operations(compiled_step(tx, 24)) - operations(compiled_step(tx, 8))) / 16

    assert each(tx) <= limit * each(CLIPPED)


PYTHON_CALLS = 240
"""Max calls of Python functions in one `Healer.update` of one optimizer; 216 with Python 3.11."""
CALLS_PER_ENGINE = 68
"""Max calls for each further optimizer; 61 with Python 3.11."""


@pytest.mark.parametrize("engines", [1, 2])
def test_a_healer_reads_once_and_computes_nothing_outside_of_jit_between_two_steps(
    engines, monkeypatch
):
    tx = optax.chain(heal_zclip(), optax.sgd(1e-3))
    packs: Counter[str] = Counter()
    pack = dispatch._pack
    monkeypatch.setattr(dispatch, "_pack", lambda arrays: packs.update(["pack"]) or pack(arrays))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states: Any) -> Any:
        found = []
        for params, memory in states:
            updates, memory = tx.update(params, memory, params, value=jnp.float32(1.0))
            found.append((optax.apply_updates(params, updates), memory))
        return found

    states = [(jax.tree.map(jnp.copy, PARAMS), tx.init(PARAMS)) for _ in range(engines)]
    with healcore.Healer("zclip", state=states, logging=healcore.Logging(console=False)) as healer:
        for _ in range(3):
            healer.update(step(healer.state))
        packs.clear()
        steps, calls = 10, Counter[str]()

        def count(frame: Any, event: str, called: Any) -> None:
            if event == "call":
                calls[frame.f_code.co_name] += 1
                calls["Python"] += 1
            elif event == "c_call":
                calls[called.__name__] += 1

        for _ in range(steps):
            state = step(healer.state)
            sys.setprofile(count)
            try:
                healer.update(state)
            finally:
                sys.setprofile(None)
    # One compiled function, one copy and one read, however many optimizers the state has.
    assert packs["pack"] == steps
    assert calls["copy_to_host_async"] == calls["asarray"] == steps
    assert calls["device_get"] == calls["bind"] == calls["apply_primitive"] == 0
    assert calls["Python"] <= steps * (PYTHON_CALLS + (engines - 1) * CALLS_PER_ENGINE)
