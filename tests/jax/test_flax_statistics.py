"""A step in Flax that keeps the batch statistics of a skipped step gets a warning, others none."""

import warnings
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

from healcore.jax import heal_zclip, protect
from healcore.jax.flax_linen import HealTrainState
from healcore.jax.flax_nnx import snapshot, update
from tests.jax import policies

PROTECT = protect(optax.sgd(0.1), policies.ZCLIP)
CHAIN = optax.chain(heal_zclip(), optax.sgd(0.1))
BAD = jnp.full((16, 4), jnp.nan)


def direct(optimizer: Any, model: Any, grads: Any, loss: Any, before: Any) -> None:
    optimizer.update(model, grads, value=loss)


def reverting(optimizer: Any, model: Any, grads: Any, loss: Any, before: Any) -> None:
    update(optimizer, model, grads, value=loss, before=before)


def without_snapshot(optimizer: Any, model: Any, grads: Any, loss: Any, before: Any) -> None:
    update(optimizer, model, grads, value=loss)


def nnx_step(tx: Any, apply: Any, layer: Any, kind: Any = nnx.Optimizer) -> Any:
    """The model after a step with a bad batch."""
    rngs = nnx.Rngs(0)
    model = nnx.Sequential(nnx.Linear(4, 8, rngs=rngs), layer(8, rngs=rngs))
    optimizer = kind(model, tx, wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, x: Any) -> None:
        before = snapshot(model)
        loss, grads = nnx.value_and_grad(lambda model: jnp.mean(model(x) ** 2))(model)
        apply(optimizer, model, grads, loss, before)

    step(model, optimizer, BAD)
    return model


class Subclass(nnx.Optimizer):
    def update(self, model: Any, grads: Any, **keywords: Any) -> Any:
        return super().update(model, grads, **keywords)


@pytest.mark.parametrize(
    ("tx", "apply", "kind"),
    [
        pytest.param(PROTECT, direct, nnx.Optimizer, id="protect"),
        pytest.param(CHAIN, direct, nnx.Optimizer, id="heal_zclip"),
        pytest.param(optax.MultiSteps(PROTECT, 1), direct, nnx.Optimizer, id="MultiSteps"),
        pytest.param(PROTECT, direct, Subclass, id="subclass"),
        pytest.param(PROTECT, without_snapshot, nnx.Optimizer, id="no snapshot"),
    ],
)
def test_nnx_batch_norm_is_named_once(tx: Any, apply: Any, kind: Any):
    with pytest.warns(UserWarning, match="statistics have NaN.*flax_nnx.snapshot") as found:
        model = nnx_step(tx, apply, nnx.BatchNorm, kind)
    assert {warning.filename for warning in found} == {__file__}
    assert jnp.isnan(model.layers[1].mean[...]).all()


def frozen(size: int, *, rngs: Any) -> Any:
    return nnx.BatchNorm(size, use_running_average=True, rngs=rngs)


@pytest.mark.parametrize(
    ("tx", "apply", "layer"),
    [
        pytest.param(PROTECT, reverting, nnx.BatchNorm, id="snapshot"),
        pytest.param(PROTECT, direct, nnx.LayerNorm, id="no statistics"),
        pytest.param(PROTECT, direct, frozen, id="frozen"),
        pytest.param(optax.sgd(0.1), direct, nnx.BatchNorm, id="no healcore"),
        pytest.param(
            protect(optax.sgd(0.1), policies.OBSERVE), direct, nnx.BatchNorm, id="observe"
        ),
    ],
)
def test_an_nnx_step_that_keeps_no_bad_statistics_gets_no_warning(tx: Any, apply: Any, layer: Any):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nnx_step(tx, apply, layer)


class Net(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        return nn.BatchNorm(use_running_average=False)(nn.Dense(8)(x))


class PlainState(TrainState):
    batch_stats: Any


class HealingState(HealTrainState):
    batch_stats: Any


def linen_step(kind: Any, **signals: Any) -> Any:
    """The state after a step with a bad batch."""
    net = Net()
    state = kind.create(apply_fn=net.apply, tx=PROTECT, **net.init(jax.random.key(0), BAD))

    def loss_of(params: Any, state: Any, x: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        out, changed = net.apply(variables, x, mutable=["batch_stats"])
        return jnp.mean(out**2), changed["batch_stats"]

    @jax.jit
    def step(state: Any, x: Any) -> Any:
        grads, stats = jax.grad(loss_of, has_aux=True)(state.params, state, x)
        return state.apply_gradients(grads=grads, batch_stats=stats, **signals)

    return step(state, BAD)


def finite(tree: Any) -> bool:
    return all(jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(tree))


def test_flaxs_own_train_state_is_named():
    with pytest.warns(UserWarning, match="statistics have NaN.*HealTrainState") as found:
        state = linen_step(PlainState)
    assert found[0].filename == __file__
    assert finite(state.params)
    assert not finite(state.batch_stats)


def test_a_heal_train_state_gets_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state = linen_step(HealingState, value=jnp.float32(1.0))
    assert finite(state.batch_stats)
