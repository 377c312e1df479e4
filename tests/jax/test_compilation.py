"""The cost of a step, steps without `jit` or prepared ahead of time, and strict promotion."""

import functools
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import healcore
from healcore.core.engine import Engine
from healcore.jax import heal, heal_zclip, last_decision, protect, scale_by_heal_lr
from healcore.jax.driver import step_reader as reading
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

SIZES = [1.0, 1.1, 0.9, 50.0, np.nan, 1.0]
"""Size of the gradients at each step."""
RESETS = policies.CUT_LR._replace(lr=policies.CUT_LR.lr._replace(reset_moments=True))
LOSS = jnp.float32(1.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    "tx",
    [
        protect(optax.adamw(0.1), RESETS),
        protect(optax.sgd(0.1), policies.ADAGC._replace(max_skips=7)),
        optax.inject_hyperparams(heal_zclip)(z_threshold=lambda step: 2.0 + step),
    ],
    ids=["reset", "adagc", "scheduled"],
)
def test_the_engine_is_one_compiled_call_of_an_eager_step(tx, monkeypatch):
    params = {"w": jnp.ones((2, 3)), "n": jnp.asarray([7], jnp.int32), "b": jnp.ones(3, "bfloat16")}
    calls = Counter[str]()
    step = Engine.step
    monkeypatch.setattr(Engine, "step", lambda *a: calls.update(["step"]) or step(*a))

    def run(update: Any) -> Any:
        updates = None
        state = tx.init(params)
        for size in SIZES:
            grads = {name: p if name == "n" else p * size for name, p in params.items()}
            updates, state = update(grads, state, params, value=LOSS)
        return jax.tree.leaves((updates, state))

    eager = run(tx.update)
    assert calls["step"] <= 2  # to trace it: the first step changes the dtype of a moment
    for one, other in zip(eager, run(jax.jit(tx.update)), strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-5)


@pytest.mark.parametrize("how", ["compiled", "serialized"])
def test_a_step_prepared_ahead_of_time_makes_the_same_bits(how):
    tx = optax.chain(protect(optax.sgd(0.1), policies.CUT_LR), scale_by_heal_lr())

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, value=LOSS)
        return optax.apply_updates(params, updates), state, last_decision(state)

    params = {"w": jnp.ones((2, 3))}
    ours = theirs = (params, tx.init(params))
    shapes = jax.eval_shape(lambda: (*ours, params))
    if how == "compiled":
        prepared: Any = step.lower(*shapes).compile()
    else:
        pytest.importorskip("flatbuffers", reason="jax.export serializes with it")
        jax.export.register_namedtuple_serialization(optax.EmptyState, serialized_name="EmptyState")
        prepared = jax.export.deserialize(jax.export.export(step)(*shapes).serialize()).call
    for size in SIZES:
        grads = jax.tree.map(lambda p, size=size: p * size, params)
        *ours, made = step(*ours, grads)
        *theirs, read = prepared(*theirs, grads)
        assert_same_bits((ours, made), (theirs, read))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "limit"),
    [
        (optax.chain(heal_zclip(), optax.adamw(1e-3)), 1.1),
        (protect(optax.adamw(1e-3), RESETS), 1.5),
    ],
    ids=["heal_zclip", "protect"],
)
def test_one_more_tensor_costs_about_what_it_costs_with_a_clip(tx, limit):
    def operations(tx: Any, tensors: int) -> int:
        """Instructions of the compiled step, with donation."""
        tx = optax.with_extra_args_support(tx)
        params = [jnp.zeros((256, 256)), jnp.zeros(256)] * (tensors // 2)

        def step(params: Any, state: Any, grads: Any) -> Any:
            updates, state = tx.update(grads, state, params, value=LOSS)
            return optax.apply_updates(params, updates), state

        state = jax.eval_shape(tx.init, params)
        compiled = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, params).compile()
        return len(re.findall(r"^\s+(?:ROOT )?\S+ = ", compiled.as_text() or "", re.MULTILINE))

    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    ours, theirs = (operations(each, 24) - operations(each, 8) for each in (tx, clipped))
    assert 0 < ours <= limit * theirs


@pytest.mark.parametrize("waits", [True, False])
def test_a_healer_reads_once_and_computes_nothing_outside_of_jit_between_two_steps(
    waits, monkeypatch
):
    tx = optax.chain(heal_zclip(), optax.sgd(1e-3))
    params = {"w": jnp.ones((4, 4))}
    calls, total = Counter[str](), Counter[str]()
    updates = 0
    copies = reading._as_block
    monkeypatch.setattr(
        reading, "_as_block", lambda arrays: calls.update(["copy"]) or copies(arrays)
    )

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states: Any) -> Any:
        found = []
        for params, memory in states:
            updates, memory = tx.update(params, memory, params, value=LOSS)
            found.append((optax.apply_updates(params, updates), memory))
        return found

    def count(frame: Any, event: str, called: Any) -> None:
        if event in ("call", "c_call"):
            calls[frame.f_code.co_name if event == "call" else called.__name__] += 1
            calls["Python"] += event == "call"

    states = [(jax.tree.map(jnp.copy, params), tx.init(params)) for _ in range(2)]
    with healcore.Healer("zclip", state=states, logging=healcore.Logging(console=False)) as healer:
        for number in range(13):
            state = step(healer.state)
            if waits:  # as a program that prints its loss
                jax.block_until_ready(state)
            calls.clear()
            sys.setprofile(count)
            try:
                healer.update(state)
            finally:
                sys.setprofile(None)
            is_traced = calls["_as_block"] > 0  # JAX calls its body once
            if number > 2 and not is_traced:
                total.update(calls)
                updates += 1
    # Two arrays of each optimizer are read at once if they were computed. Otherwise one compiled
    # function copies all of them, and a busy machine decides how often.
    assert updates >= 9
    copied = total["copy"]
    assert copied == 0 if waits else copied <= updates
    assert total["copy_to_host_async"] == 4 * copied
    assert total["device_get"] == total["bind"] == total["apply_primitive"] == 0
    assert total["Python"] <= updates * 280


VECTOR = {"w": jnp.ones(3)}
MIXED = {**VECTOR, "b": jnp.ones(2, jnp.bfloat16)}
INNER = optax.lion(1e-3)
INJECTED = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1)  # itself refuses `MIXED`


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (optax.chain(heal_zclip(), INNER), MIXED),
        (optax.chain(optax.inject_hyperparams(heal_zclip)(max_norm=0.5), INNER), VECTOR),
        (optax.chain(heal(policies.ADAGC), INNER, scale_by_heal_lr()), MIXED),
        (protect(INNER, policies.EVERYTHING), MIXED),
        (protect(INJECTED, policies.CUT_LR), VECTOR),
    ],
    ids=["heal_zclip", "injected", "heal", "everything", "schedule"],
)
@pytest.mark.filterwarnings("ignore:no loss reaches")
def test_updates_are_traced_under_strict_promotion(tx, params):
    with jax.numpy_dtype_promotion("strict"):
        state = tx.init(params)
        for signals in (
            {},
            {"value": 1.0, "learning_rate": 0.1, "eval_loss": 1.0, "grad_norm": 1.0},
            {"value": jnp.bfloat16(1), "externally_skipped": jnp.bool_(False)},
        ):
            update = functools.partial(tx.update, **signals)
            jax.eval_shape(update, params, state, params)  # compiles nothing
        tx.update(params, state, params)
