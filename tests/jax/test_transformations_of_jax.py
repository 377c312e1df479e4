"""scan, vmap and shard_map over the optimizers."""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from healcore.jax import heal_zclip, last_decision, metrics, protect
from tests.jax import policies
from tests.jax.bit_comparison import assert_same_bits
from tests.jax.processes import Program

GRADS = np.random.default_rng(0).standard_normal((40, 4)).astype(np.float32)
GRADS[10] = np.nan
GRADS[20] *= 1e4
GRADS[30, 2] = np.inf


def test_scan_decides_as_a_loop_of_compiled_steps():
    """More flows, with each transformation: `control_flow`."""
    tx, params = protect(optax.adamw(0.1), policies.SKIP), jnp.ones(4)

    def step(carry, grads):
        params, state = carry
        updates, state = tx.update(grads, state, params, value=jnp.float32(1.0))
        return (optax.apply_updates(params, updates), state), last_decision(state)

    start = (params, tx.init(params))
    (scanned, _), decisions = jax.jit(lambda c: jax.lax.scan(step, c, jnp.asarray(GRADS)))(start)
    carry, skips = start, []
    compiled = jax.jit(step)
    for grads in GRADS:
        carry, decision = compiled(carry, grads)
        skips.append(bool(decision.skip))
    np.testing.assert_array_equal(decisions.skip, skips)
    assert skips[10]
    assert skips[30]
    np.testing.assert_allclose(scanned, carry[0], rtol=1e-5)


def test_vmapped_runs_are_judged_each_by_itself():
    tx = protect(optax.adamw(0.1), policies.SKIP)
    params = jnp.ones((3, 4))
    state = jax.vmap(tx.init)(params)
    grads = jnp.ones((3, 4)).at[1, 2].set(jnp.nan)
    step = jax.jit(jax.vmap(lambda g, s, p: tx.update(g, s, p, value=jnp.float32(1.0))))
    updates, new = step(grads, state, params)
    assert last_decision(new).skip.tolist() == [False, True, False]
    moved = optax.apply_updates(params, updates)
    assert_same_bits(moved[1], params[1])
    assert_same_bits(
        jax.tree.map(lambda x: x[1], new.inner_state),
        jax.tree.map(lambda x: x[1], state.inner_state),
    )
    assert (moved[0] != params[0]).all()


def test_a_sweep_over_thresholds_runs_in_one_vmap():
    def clips(threshold):
        tx = heal_zclip(z_threshold=threshold, max_norm=None)

        step = lambda state, grads: (tx.update(grads, state)[1], None)  # noqa: E731
        state, _ = jax.lax.scan(step, tx.init(jnp.ones(4)), grads)
        return metrics(state)["heal/clips"]

    grads = jnp.asarray(np.random.default_rng(1).standard_normal((80, 4)), jnp.float32)
    counts = jax.jit(jax.vmap(clips))(jnp.asarray([0.5, 2.0, 1e9]))
    assert counts[0] > counts[1] > counts[2] == 0


@pytest.mark.parametrize("kind", ["heal_zclip", "protect"])
def test_inside_shard_map_with_a_reduced_norm(kind):
    mesh = jax.make_mesh((len(jax.devices()),), ("data",), axis_types=(AxisType.Auto,))
    tx = (
        optax.chain(heal_zclip(), optax.sgd(1.0))
        if kind == "heal_zclip"
        else protect(optax.sgd(1.0, momentum=0.9), policies.ZCLIP)
    )
    params = jnp.ones(4 * len(jax.devices()))
    state = tx.init(params)
    state_spec = jax.tree.map(lambda x: P("data") if x.shape == params.shape else P(), state)

    def step(params, state, grads):
        norm = jnp.sqrt(jax.lax.psum(jnp.sum(grads**2), "data"))
        updates, state = tx.update(grads, state, params, grad_norm=norm)
        return optax.apply_updates(params, updates), state

    run = jax.jit(
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(P("data"), state_spec, P("data")),
            out_specs=(P("data"), state_spec),
        )
    )
    moved, state = run(params, state, jnp.ones_like(params))
    assert (moved < params).all()
    kept, state = run(moved, state, jnp.ones_like(params).at[-1].set(jnp.nan))
    assert bool(last_decision(state).skip)
    if kind == "protect":
        assert_same_bits(kept, moved)


@pytest.mark.parametrize(
    "name",
    [
        "heal_zclip",
        "protect",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("heal", "observe", "pretraining", "no_clip", "line_search")
        ),
    ],
)
def test_runs_in_every_control_flow_and_with_a_sharded_state(name):
    scenario = f"control_flow:run:{name}"
    assert Program("", scenario, world=1, devices=4).of(scenario) == [None]
