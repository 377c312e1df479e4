"""The cost of a step, steps without `jit` or prepared ahead of time, and strict promotion."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false, reportCallIssue=false

from __future__ import annotations

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
from healcore import policy
from healcore.core.engine import Engine
from healcore.jax import heal, heal_zclip, last_decision, protect, scale_by_heal_lr
from healcore.jax.driver import engines as reading
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits

PARAMS = {"w": jnp.ones((2, 3)), "n": jnp.asarray([7], jnp.int32), "b": jnp.ones(3, jnp.bfloat16)}
SIZES = [1.0, 1.1, 0.9, 50.0, np.nan, 1.0]
RESETS = policies.CUT_LR._replace(lr=policies.CUT_LR.lr._replace(reset_moments=True))
OPTIMIZERS: dict[str, Any] = {
    "reset": protect(optax.adamw(0.1), RESETS),
    "adagc": protect(optax.sgd(0.1), policies.ADAGC._replace(max_skips=7)),
    "scheduled": optax.inject_hyperparams(heal_zclip)(z_threshold=lambda step: 2.0 + step),
}


def steps(tx: Any, update: Any) -> tuple[Any, Any]:
    """Updates and state after gradients of several sizes, one of them NaN."""
    state, updates = tx.init(PARAMS), None
    for size in SIZES:
        grads = jax.tree.map(lambda p, size=size: p if p.dtype == jnp.int32 else p * size, PARAMS)
        updates, state = update(grads, state, PARAMS, value=jnp.float32(1.0))
    return updates, state


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_engine_is_one_compiled_call(name, monkeypatch):
    tx = OPTIMIZERS[name]
    calls, step = [], Engine.step
    monkeypatch.setattr(
        Engine, "step", lambda self, *args, **xp: calls.append(1) or step(self, *args, **xp)
    )
    eager = steps(tx, tx.update)
    assert len(calls) <= 1  # to trace it, where no other test has
    compiled = steps(tx, jax.jit(tx.update))
    for one, other in zip(jax.tree.leaves(eager), jax.tree.leaves(compiled), strict=True):
        np.testing.assert_allclose(np.float64(one), np.float64(other), rtol=1e-5)


@pytest.mark.parametrize("how", ["compiled", "serialized"])
def test_a_step_prepared_ahead_of_time_makes_the_same_bits(how):
    tx = optax.chain(protect(optax.sgd(0.1), policies.CUT_LR), scale_by_heal_lr())

    @jax.jit
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
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


# -- the fixed cost of a step, counted and not timed ----------------------------------------------

MATRIX = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
CLIPPED = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


@pytest.mark.parametrize("preset", ["default", "observe", "conservative", "aggressive", "zclip"])
def test_the_healing_part_is_a_few_arrays(preset):
    bare = len(jax.tree.leaves(optax.adamw(1e-3).init(MATRIX)))
    healed = len(jax.tree.leaves(protect(optax.adamw(1e-3), preset).init(MATRIX)))
    assert healed - bare <= 12


def test_the_default_engine_is_few_operations_in_few_kernels():
    engine = policy.load("default").engine()
    tx = protect(optax.sgd(1e-3), engine)
    update = jax.jit(lambda g, s, loss: tx.update(g, s, MATRIX, value=loss))
    compiled = update.lower(MATRIX, tx.init(MATRIX), jnp.float32(1.0)).compile()
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
    pack = reading._pack
    monkeypatch.setattr(reading, "_pack", lambda arrays: packs.update(["pack"]) or pack(arrays))

    @functools.partial(jax.jit, donate_argnums=0)
    def step(states: Any) -> Any:
        found = []
        for params, memory in states:
            updates, memory = tx.update(params, memory, params, value=jnp.float32(1.0))
            found.append((optax.apply_updates(params, updates), memory))
        return found

    states = [(jax.tree.map(jnp.copy, MATRIX), tx.init(MATRIX)) for _ in range(engines)]
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


# -- strict promotion -----------------------------------------------------------------------------

VECTOR = {"w": jnp.ones(3)}
MIXED = {**VECTOR, "b": jnp.ones(2, jnp.bfloat16)}
INNER = optax.lion(1e-3)
SIGNALS = [
    {},
    {"value": 1.0, "learning_rate": 0.1, "eval_loss": 1.0, "grad_norm": 1.0},
    {"value": jnp.bfloat16(1), "externally_skipped": jnp.bool_(False)},
]


@pytest.fixture
def strict():
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    yield
    jax.config.update("jax_numpy_dtype_promotion", "standard")


INJECTED = optax.inject_hyperparams(optax.sgd)(lambda count: 0.1)  # itself refuses `MIXED`


@pytest.mark.parametrize(
    ("tx", "params"),
    [
        (optax.chain(heal_zclip(), INNER), MIXED),
        (optax.chain(optax.inject_hyperparams(heal_zclip)(max_norm=0.5), INNER), VECTOR),
        (optax.chain(heal(policies.ADAGC), INNER, scale_by_heal_lr()), MIXED),
        (protect(INNER, policies.OBSERVE), MIXED),
        (protect(INNER, policies.UPDATES), MIXED),
        (protect(INNER, policies.EVERYTHING), MIXED),
        (protect(INJECTED, policies.CUT_LR), VECTOR),
    ],
    ids=["heal_zclip", "injected", "heal", "observe", "update_norm", "everything", "schedule"],
)
@pytest.mark.filterwarnings("ignore:no loss reaches")
@pytest.mark.usefixtures("strict")
def test_updates_under_strict_promotion(tx, params):
    state = tx.init(params)
    for signals in SIGNALS:
        update = functools.partial(tx.update, **signals)
        jax.eval_shape(update, params, state, params)  # compiles nothing
    tx.update(params, state, params)
