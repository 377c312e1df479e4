"""In JAX: with a `loss_fn` the weights are compared with earlier ones; damage is undone."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.core import Tracer

from healcore import Healer, Logging
from healcore.events import read
from healcore.jax import from_dict, metrics, protect, to_dict
from healcore.policy import engine_of, load
from healcore.runtime.recovery.orders import limited
from tests.healer.run_options import grouped

STEPS = 400
CHANGE = 250


def data(number: int, *, relabelled: bool = False, bad: bool = False) -> Any:
    random = np.random.default_rng(number)
    x = random.standard_normal((64, 6)).astype(np.float32)
    y = (x[:, 0] > 0) * 2 + (x[:, 1] > 0)
    if bad:
        x[0] = np.nan
    return x, (y + 1) % 4 if relabelled else y


def loss_of(params: Any, batch: Any) -> Any:
    x, y = batch
    logits = jnp.tanh(x @ params["a"]) @ params["b"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def initial() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "a": jax.random.normal(keys[0], (6, 32)) / 2.5,
        "b": jax.random.normal(keys[1], (32, 4)) / 6,
    }


@functools.cache  # compiling takes seconds
def program(parts: int = 1) -> tuple[Any, Any]:
    tx: Any = protect(optax.inject_hyperparams(optax.adam)(learning_rate=1e-2), "default")
    if parts > 1:
        tx = optax.MultiSteps(tx, parts, should_skip_update_fn=optax.skip_not_finite)

    @jax.jit
    def step(state: Any, batch: Any, rate: Any) -> Any:
        params, opt, *rest = state
        if parts == 1:
            opt = optax.tree.set(opt, learning_rate=rate)
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, opt = tx.update(grads, opt, params, value=loss)
        return optax.apply_updates(params, updates), opt, *rest

    return tx, step


evaluate = jax.jit(loss_of)


class Run:
    """A run of 400 steps, or fewer with several batches a step."""

    def __init__(self, *, parts: int = 1, mask: bool = False) -> None:
        self.tx, self.program = program(parts)
        self.parts = parts
        params = initial()
        self.state: Any = (params, self.tx.init(params))
        if mask:
            self.state = (*self.state, jnp.full((3,), -jnp.inf))
        self.batches = [data(number) for number in range(STEPS)]
        self.rate = 1e-2
        self.edit: Callable[[int, Any], Any] = lambda step, state: state
        self.compared: list[Any] = []

    def loss_fn(self, state: Any, batch: Any) -> Any:
        if not isinstance(batch[0], Tracer):
            self.compared.append(batch)
        return evaluate(state[0], batch)

    def train(self, folder: Path, *, asks: bool = True, **options: Any) -> Healer:
        options = {"loss_fn": self.loss_fn if asks else None, **options}
        with Healer(
            "default", state=self.state, **grouped(options, events=folder / "e.jsonl")
        ) as healer:
            for batch in healer.batches(self.batches):
                state = self.edit(healer.step, healer.state)
                healer.update(self.program(state, batch, jnp.float32(self.rate)))
        self.state = healer.state
        return healer


def events(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [e for e in read(folder / "e.jsonl").events if e["kind"] == kind]


def multiplier(healer: Healer) -> float:
    return float(healer.metrics()["heal/lr_scale"])


def reversed_layer(params: Any) -> Any:
    return {**params, "b": -4.0 * params["b"]}


# -- damage, and a rate that jumps ----------------------------------------------------------------


def test_damaged_weights_are_rolled_back(tmp_path):
    run, done = Run(), []

    def damage(step: int, state: Any) -> Any:
        if step != CHANGE or done:
            return state
        done.append(step)
        return (reversed_layer(state[0]), *state[1:])

    run.edit = damage
    healer = run.train(tmp_path)
    (found,) = (e for e in events(tmp_path, "assessment") if e["verdict"] == "damage")
    assert found["by"] == "earlier_weights"
    assert healer.rollbacks == 1
    assert events(tmp_path, "rollback")[0]["checkpoint"] == 200
    assert multiplier(healer) == 1.0


def test_a_rate_that_jumps_is_limited_to_the_last_healthy_one(tmp_path, caplog):
    run = Run()

    def jump(step: int, state: Any) -> Any:
        run.rate = 1.0 if step >= CHANGE else 0.01
        return state

    run.edit = jump
    healer = run.train(tmp_path)
    (*_, back) = events(tmp_path, "rollback")
    assert back["lr"] == pytest.approx(1.0)
    assert back["lr_limit"] == pytest.approx(0.01)
    assert "learning rate at most 0.01 (it was 1)" in caplog.text
    assert multiplier(healer) <= 0.01001


# -- healthy changes ------------------------------------------------------------------------------


@pytest.mark.parametrize("asks", [False, True])
def test_new_labels_cost_nothing(tmp_path, asks):
    run = Run(mask=True)  # one that is meant to be infinite is no damage
    run.batches = [data(number, relabelled=number >= CHANGE) for number in range(STEPS)]
    healer = run.train(tmp_path, asks=asks)
    assert healer.rollbacks == 0
    assert multiplier(healer) == 1.0
    assert not events(tmp_path, "lr")


@pytest.mark.parametrize("asks", [False, True])
def test_steps_that_are_not_finite_have_changed_nothing(tmp_path, asks):
    """The gradient's norms of such a step are in the state, for the diagnosis."""
    run = Run()
    run.batches = [data(number, bad=250 <= number < 264) for number in range(STEPS)]
    healer = run.train(tmp_path, asks=asks)
    assert {e["verdict"] for e in events(tmp_path, "assessment")} == {"unknown"}
    assert healer.rollbacks == 0
    assert all(np.isfinite(each).all() for each in jax.tree.leaves(healer.state[0]))


# -- all batches of a step ------------------------------------------------------------------------


def numbers(run: Run) -> set[int]:
    """The batches that were compared, by their place in the data."""
    first = [batch[0][0, 0] for batch in run.batches]
    return {first.index(batch[0][0, 0]) for batch in run.compared}


def test_every_batch_of_an_accumulation_is_compared(tmp_path):
    run = Run(parts=4)
    run.train(tmp_path)
    compared = numbers(run)
    assert compared
    assert {4 * (number // 4) + i for number in compared for i in range(4)} == compared


def test_every_batch_of_a_dispatch_of_many_steps_is_compared(tmp_path):
    tx = protect(optax.adam(1e-2), "default", records=8)

    @jax.jit
    def many(state: Any, batches: Any) -> Any:
        def one(state: Any, batch: Any) -> Any:
            params, opt = state
            loss, grads = jax.value_and_grad(loss_of)(params, batch)
            updates, opt = tx.update(grads, opt, params, value=loss)
            return (optax.apply_updates(params, updates), opt), None

        return jax.lax.scan(one, state, batches)[0]

    run, waiting = Run(), []
    state = (initial(), tx.init(initial()))
    done = False
    with Healer(
        "default", state=state, logging=Logging(events=tmp_path / "e.jsonl"), loss_fn=run.loss_fn
    ) as healer:
        for batch in healer.batches(run.batches):
            waiting.append(batch)
            if len(waiting) < 8:
                continue
            state = healer.state
            if healer.step == 248 and not done:
                done, state = True, ({**state[0], "b": -4.0 * state[0]["b"]}, *state[1:])
            stacked = jax.tree.map(lambda *each: jnp.stack(each), *waiting)
            waiting.clear()
            healer.update(many(state, stacked))
    compared = numbers(run)
    assert compared
    assert {8 * (number // 8) + i for number in compared for i in range(8)} == compared
    assert healer.rollbacks <= 1


# -- nnx: objects that are updated in place -------------------------------------------------------


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.inner = nnx.Linear(6, 32, rngs=rngs)
        self.norm = nnx.BatchNorm(32, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.outer = nnx.Linear(32, 4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.outer(self.dropout(jnp.tanh(self.norm(self.inner(x)))))


def nnx_loss(model: Net, batch: Any) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(model(batch[0]), batch[1]).mean()


def test_objects_that_are_updated_in_place_keep_their_statistics_and_keys(tmp_path):
    evaluated = nnx.jit(nnx_loss)

    @nnx.jit
    def train(model: Net, optimizer: Any, batch: Any) -> None:
        loss, grads = nnx.value_and_grad(nnx_loss)(model, batch)
        optimizer.update(model, grads, value=loss)

    ended = []
    for asks in (False, True):
        model, calls = Net(nnx.Rngs(0)), []
        optimizer = nnx.Optimizer(model, protect(optax.adam(1e-2), "default"), wrt=nnx.Param)

        def loss_fn(batch: Any, model: Net = model, calls: list[Any] = calls) -> Any:
            calls.append(batch)
            return evaluated(model, batch)

        state = {"model": model, "optimizer": optimizer}
        options: Any = {"loss_fn": loss_fn} if asks else {}
        with Healer("default", state=state, **grouped(options)) as healer:
            for batch in healer.batches([data(n, relabelled=n >= 120) for n in range(160)]):
                train(model, optimizer, batch)
                healer.update()
        assert healer.rollbacks == 0
        assert (len(calls) > 4) is asks
        ended.append(jax.tree.leaves(nnx.to_pure_dict(nnx.state(model))))
    for a, b in zip(*ended, strict=True):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(a, b)


def test_the_limit_on_an_injected_rate_is_absolute():
    """After a cut the multiplier is 1 where the schedule has decayed below the limit."""
    policy = load(
        "default",
        detect={"instability": {}},
        respond=[{"to": ["instability"], "do": ["rollback", "cut_lr"]}],
    )
    tx = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=3.0), policy)
    curvature = jnp.linspace(0.1, 1.0, 8)

    @jax.jit
    def step(params: Any, state: Any, rate: Any) -> Any:
        state = optax.tree.set(state, learning_rate=rate)
        loss, grads = jax.value_and_grad(lambda w: (curvature * w**2).sum() / 2 + 1.0)(params)
        updates, state = tx.update(grads, state, params, value=loss)
        return optax.apply_updates(params, updates), state

    params = jnp.ones(8)
    state, scales = tx.init(params), []
    for number in range(200):
        params, state = step(params, state, jnp.float32(3.0 if number < 100 else 0.3))
        scales.append(float(metrics(state)["heal/lr_scale"]))
    assert 3.0 * scales[99] < 2.0
    assert scales[-1] == 1.0


@pytest.mark.parametrize("eager", [False, True])
def test_a_limit_holds_in_the_step_in_which_an_injected_schedule_jumps(eager):
    """The schedule computes the rate in the update, after the policy has judged the step."""
    schedule = optax.piecewise_constant_schedule(0.1, {20: 30.0})
    tx = protect(optax.inject_hyperparams(optax.sgd)(learning_rate=schedule), "default")
    state, sizes = tx.init(jnp.ones(1)), []
    engines = {"": to_dict(state, "default")}
    (limited_to,) = limited(engine_of("default"), engines, 3.0, 0.1, healthy=True).values()
    state = from_dict(state, limited_to, "default")
    step = tx.update if eager else jax.jit(tx.update)
    for _ in range(40):
        updates, state = step(jnp.ones(1), state, jnp.ones(1), value=jnp.float32(1.0))
        sizes.append(float(-jax.tree.leaves(updates)[0][0]))
    np.testing.assert_allclose(sizes, 0.1, rtol=1e-5)
