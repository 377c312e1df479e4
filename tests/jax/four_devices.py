"""Steps inside shard_map over four devices: `check` is a scenario of `processes`."""

# optax types arrays as a union of many kinds.
# pyright: reportArgumentType=false, reportIndexIssue=false

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, PartitionSpec

from healcore.jax import heal, heal_zclip, last_decision, metrics, protect, scale_by_heal_lr
from healcore.jax.heal_state import find
from tests.jax import policies

MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()
PARAMS = jnp.ones(8)


def compiled(make, *, split, check=False, **axes):
    """A function from two (gradient, one loss per device) to what every device then holds."""
    tx = make(**(axes or {"shard_axis_name" if split else "axis_name": "data"}))

    def train(params, grads, losses):
        state, after = tx.init(params), []
        for i in range(2):
            updates, state = tx.update(grads[i], state, params, value=losses[i, 0])
            params = optax.apply_updates(params, updates)
            after.append(params)
        read = {name: jnp.asarray(x, jnp.float32)[None] for name, x in metrics(state).items()}
        read["skip"] = last_decision(state).skip[None]
        read["norm"] = find(state).heal_leaf_norms
        return jnp.stack(after) if split else jnp.stack(after)[:, None], read

    part = SPLIT if split else WHOLE
    of_steps = PartitionSpec(None, "data")
    step = jax.jit(
        jax.shard_map(
            train,
            mesh=MESH,
            in_specs=(part, of_steps if split else WHOLE, of_steps),
            out_specs=(of_steps, SPLIT),
            check_vma=check,
        )
    )

    def run(*batches):
        grads, losses = (
            jnp.asarray(np.stack(each), jnp.float32) for each in zip(*batches, strict=True)
        )
        after, read = step(PARAMS, grads, losses)
        found = {name: np.asarray(value) for name, value in read.items()}
        return {"first": np.asarray(after[0]), "second": np.asarray(after[1]), **found}

    return run


OPTIMIZERS = {
    "protect": lambda **o: protect(optax.sgd(0.1), policies.ZCLIP, **o),
    "heal_zclip": lambda **o: optax.chain(heal_zclip(**o), optax.sgd(0.1)),
}
GOOD = (np.full(8, 0.1), np.arange(4.0))
HALF_BAD = np.full(8, 0.1)
HALF_BAD[1] = np.nan  # on the first device alone


def same(found, name):
    assert len({value.tobytes() for value in found[name]}) == 1, (name, found[name])
    return found[name][0]


BAD_LOSS = (GOOD[0], np.asarray([0.0, np.nan, 0.0, 0.0]))


def check(root: Any) -> None:
    """Every device holds the same."""
    del root
    for name, make in OPTIMIZERS.items():
        for split in (False, True):
            run = compiled(make, split=split)
            good = run(GOOD, GOOD)
            norm = float(np.linalg.norm(GOOD[0]))
            np.testing.assert_allclose(same(good, "heal/grad_norm"), norm, rtol=1e-5)
            np.testing.assert_allclose(same(good, "norm"), norm, rtol=1e-5)
            assert same(good, "heal/loss") == 1.5
            assert not same(good, "skip")
            assert (good["second"] < good["first"]).all()
            for batch in [BAD_LOSS] + ([(HALF_BAD, GOOD[1])] if split else []):
                found = run(GOOD, batch)
                assert same(found, "skip"), name
                assert same(found, "heal/steps") == 2
                np.testing.assert_array_equal(found["second"], found["first"])
            if split and name == "heal_zclip":  # in parts, above the limit only as a whole
                clipped = run((np.full(8, 0.5), GOOD[1]), GOOD)["first"]
                np.testing.assert_allclose(clipped, 1 - 0.1 * 0.5 / np.sqrt(2.0), rtol=1e-5)

    # Each tensor clipped by its own norm.
    run = compiled(lambda **o: heal(policies.ADAGC, **o), split=True)
    np.testing.assert_allclose(same(run(GOOD, GOOD), "norm"), norm, rtol=1e-5)
    assert same(run(GOOD, (HALF_BAD, GOOD[1])), "skip")

    # With check_vma, jax's default, just the same; and what it is without an axis.
    checked = compiled(OPTIMIZERS["protect"], split=True, check=True)(GOOD, BAD_LOSS)
    assert same(checked, "skip")
    alone = compiled(lambda **o: protect(optax.sgd(0.1), policies.ZCLIP), split=False)
    assert alone(GOOD, BAD_LOSS)["skip"].tolist() == [False, True, False, False]

    # A fresh state lies on the parameters' mesh: a step is traced once.
    for kind in (AxisType.Auto, AxisType.Explicit):
        mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
        params = jax.device_put(jnp.ones((8, 4)), jax.sharding.NamedSharding(mesh, SPLIT))
        for tx in (
            protect(optax.noisy_sgd(0.1, key=jax.random.key(0)), policies.ADAGC),
            protect(optax.adam(0.1), policies.BOTH),
            optax.chain(heal_zclip(), optax.sgd(0.1), scale_by_heal_lr()),
        ):
            traced = []

            @functools.partial(jax.jit, donate_argnums=(0, 1))
            def step(params, state, tx=tx, traced=traced):
                traced.append(True)
                updates, state = tx.update(params, state, params, value=jnp.sum(params))
                return optax.apply_updates(params, updates), state

            moved, state = jax.tree.map(jnp.copy, params), tx.init(params)
            for _ in range(3):
                moved, state = step(moved, state)
            assert len(traced) == 1, kind
