"""Small runs as users write them: plain optax, a linen TrainState, nnx objects. All donate."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from healcore.core.decision import Action, Cause
from healcore.core.detectors import NonFiniteConfig
from healcore.core.engine import EngineConfig, LrConfig, RuleConfig
from healcore.jax import protect
from healcore.jax.driver.driver import JaxDriver
from healcore.jax.flax_linen import HealTrainState
from healcore.jax.flax_nnx import snapshot, update

NONFINITE = int(Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD)
POLICY = EngineConfig(
    detectors=(("nonfinite", NonFiniteConfig()),),
    rules=(RuleConfig(NONFINITE, skip=True, action=int(Action.ROLLBACK | Action.CUT_LR)),),
    lr=LrConfig(factor=0.25, floor=0.01, hold_steps=3, ramp_steps=4),
)


class SmallJaxRun(NamedTuple):
    """One kind of run."""

    state: Any
    """The state that the user passes to the Healer."""
    step: Callable[[Any, Any], Any]
    """(live state, batch) -> new state, or None where it was changed in place."""
    compiled: Callable[[], int]
    """How often the step has been compiled."""


def batch(seed: int, *, bad: bool = False) -> Any:
    x = np.random.default_rng(seed).standard_normal((8, 4)).astype(np.float32)
    return jnp.asarray(np.full_like(x, np.nan) if bad else x)


def mse(prediction: Any, x: Any) -> Any:
    return jnp.mean((prediction - jnp.sum(x, axis=1, keepdims=True)) ** 2)


def plain(
    inner: Any = None, policy: Any = POLICY, wrap: Callable[..., Any] = protect, **extra: Any
) -> SmallJaxRun:
    """A dictionary of parameters, optimizer state and other parts."""
    tx, step = _plain_program(inner, policy, wrap)
    params = {"hidden": jnp.full((4, 3), 0.1), "out": {"w": jnp.full((3, 1), 0.2)}}
    return SmallJaxRun(
        {"params": params, "opt_state": tx.init(params), **extra}, step, step._cache_size
    )


@functools.cache  # compiling takes seconds
def _plain_program(inner: Any, policy: Any, wrap: Callable[..., Any]) -> Any:
    tx = wrap(inner or optax.adamw(1e-2), policy)

    def loss_of(params: Any, x: Any) -> Any:
        return mse(jnp.tanh(x @ params["hidden"]) @ params["out"]["w"], x)

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], x)
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=loss)
        params = optax.apply_updates(state["params"], updates)
        return {**state, "params": params, "opt_state": opt_state}

    return tx, step


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any, *, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9)(nn.Dense(3)(x))
        return nn.Dense(1)(nn.Dropout(0.2, deterministic=not train)(x))


class State(HealTrainState):
    batch_stats: Any
    key: Any


def linen(policy: Any = POLICY) -> SmallJaxRun:
    """A TrainState with batch statistics and a key, whose `step` begins as the number 0."""
    model, tx, step = _linen_program(policy)
    variables = model.init(jax.random.key(0), batch(0), train=False)
    state = State.create(
        apply_fn=model.apply,
        params=variables["params"],
        tx=tx,
        batch_stats=variables["batch_stats"],
        key=jax.random.key(1),
    )
    return SmallJaxRun(state, step, step._cache_size)


@functools.cache
def _linen_program(policy: Any) -> Any:
    model = Net()

    @functools.partial(jax.jit, donate_argnums=0)
    def step(state: Any, x: Any) -> Any:
        key, dropout = jax.random.split(state.key)

        def loss_of(params: Any) -> Any:
            out, changed = model.apply(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                mutable=["batch_stats"],
                rngs={"dropout": dropout},
            )
            return mse(out, x), changed["batch_stats"]

        (loss, stats), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads, value=loss, batch_stats=stats, key=key)

    return model, protect(optax.adamw(1e-2), policy), step


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs) -> None:
        self.first = nnx.Linear(4, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.2, rngs=rngs)
        self.rest = nnx.List([nnx.Linear(3, 1, rngs=rngs)])

    def __call__(self, x: Any) -> Any:
        self.seen = nnx.Intermediate(x)  # as `sow`: no part of the state
        return self.rest[0](self.dropout(self.norm(self.first(x))))


def in_place(policy: Any = POLICY) -> SmallJaxRun:
    """Nnx objects, with a metric that is not differentiated."""
    model = Model(nnx.Rngs(0))
    tx, step, traces = _nnx_program(policy)
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    state = {"model": model, "optimizer": optimizer, "metric": nnx.metrics.Average("loss")}
    return SmallJaxRun(state, step, lambda: len(traces))


@functools.cache
def _nnx_program(policy: Any) -> Any:
    traces = []

    @nnx.jit
    def compiled(model: Any, optimizer: Any, metric: Any, x: Any) -> None:
        traces.append(1)
        before = snapshot(model)
        loss, grads = nnx.value_and_grad(lambda model: mse(model(x), x))(model)
        update(optimizer, model, grads, value=loss, before=before)
        metric.update(loss=jnp.where(jnp.isfinite(loss), loss, 0.0))

    def step(live: Any, x: Any) -> None:
        compiled(live["model"], live["optimizer"], live["metric"], x)

    return protect(optax.adamw(1e-2), policy), step, traces


RUNS = {"plain": plain, "linen": linen, "nnx": in_place}


def driven(run: SmallJaxRun, policy: Any = POLICY) -> tuple[SmallJaxRun, JaxDriver]:
    """A run, and the driver that its Healer has."""
    return run, JaxDriver(run.state, policy)


def advance(driver: JaxDriver, run: SmallJaxRun, batches: Sequence[Any]) -> list[Any]:
    """Steps the run; the handles of the steps, read at the end only."""
    handles = []
    for each in batches:
        driver.update(run.step(driver.live, each))
        handles.append(driver.take_dispatch())
    return handles


def every_third(inner: Any, policy: Any) -> Any:
    steps: Any = optax.MultiSteps(protect(inner, policy), every_k_schedule=3)
    return optax.GradientTransformationExtraArgs(steps.init, steps.update)
