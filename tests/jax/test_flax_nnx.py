import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from healcore.jax import heal_zclip, protect
from healcore.jax.flax_nnx import last_decision, metrics, snapshot, update
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits, differs

X = jnp.asarray(np.random.default_rng(0).standard_normal((8, 3)), jnp.float32)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.inner = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.outer = nnx.Linear(4, 1, rngs=rngs)

    def __call__(self, x):
        return self.outer(self.dropout(nnx.relu(self.norm(self.inner(x)))))


@nnx.jit
def step(model, optimizer, x):
    before = snapshot(model)
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean((m(x) - 1.0) ** 2))(model)
    return loss, update(optimizer, model, grads, value=loss, before=before)


def build(tx):
    model = Net(nnx.Rngs(0))
    return model, nnx.Optimizer(model, tx, wrt=nnx.Param)


def copied(tree):
    return jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(tree)))


def test_a_bad_batch_is_undone_whole_and_training_continues():
    model, optimizer = build(protect(optax.adamw(0.05), policies.ZCLIP))
    first, decision = step(model, optimizer, X)
    assert not bool(decision.skip)
    weights, moments = copied(snapshot_of(model)), copied(optimizer)["opt_state"]["inner_state"]
    _, decision = step(model, optimizer, X.at[0, 0].set(jnp.nan))
    assert bool(decision.skip)
    assert_same_bits(copied(snapshot_of(model)), weights)
    assert_same_bits(copied(optimizer)["opt_state"]["inner_state"], moments)
    assert int(optimizer.step[...]) == 1
    assert bool(last_decision(optimizer).skip)
    assert int(metrics(optimizer)["heal/skips"]) == 1
    for _ in range(30):
        loss, _ = step(model, optimizer, X)
    assert float(loss) < 0.5 * float(first)
    assert differs(copied(snapshot_of(model)), weights)


def test_random_streams_go_on_over_a_skip():
    model, optimizer = build(protect(optax.adamw(0.05), policies.ZCLIP))
    before = drawn(model)
    step(model, optimizer, X.at[0].set(jnp.nan))
    assert drawn(model) == before + 1


def test_plain_optimizer_update_hears_the_loss():
    model, optimizer = build(optax.chain(heal_zclip(), optax.adamw(0.05)))

    @nnx.jit
    def plain(model, optimizer, value):
        grads = nnx.grad(lambda m: jnp.mean(m(X) ** 2))(model)
        optimizer.update(model, grads, value=value)

    plain(model, optimizer, jnp.float32(3.5))
    assert float(metrics(optimizer)["heal/loss"]) == 3.5


def drawn(model):
    assert model.dropout.rngs is not None
    return int(model.dropout.rngs.count[...])


def snapshot_of(model):
    return nnx.State(nnx.state(model, nnx.Not(nnx.RngState)))
