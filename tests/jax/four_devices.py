"""Scenarios of `processes` on four devices: shard_map, explicit axes, each control flow of JAX."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from healcore.jax import heal, heal_zclip, last_decision, metrics, protect
from healcore.jax.opt_state import find
from tests.jax import policies

MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
SPLIT, WHOLE = PartitionSpec("data"), PartitionSpec()
PARAMS = jnp.ones(8)


def compiled(make, *, split, check=False, **axes):
    """A function from two (gradient, one loss per device) to what every device then holds."""
    tx = make(**(axes or {"shard_axis_name" if split else "axis_name": "data"}))

    def train(params, grads, losses):
        state = tx.init(params)
        after = []
        for i in range(2):
            updates, state = tx.update(grads[i], state, params, value=losses[i, 0])
            params = optax.apply_updates(params, updates)
            after.append(params)
        read = {name: jnp.asarray(x, jnp.float32)[None] for name, x in metrics(state).items()}
        read |= {"skip": last_decision(state).skip[None], "norm": find(state).heal_leaf_norms}
        return jnp.stack(after) if split else jnp.stack(after)[:, None], read

    of_steps = PartitionSpec(None, "data")
    specs = {
        "in_specs": (SPLIT, of_steps, of_steps) if split else (WHOLE, WHOLE, of_steps),
        "out_specs": (of_steps, SPLIT),
    }
    step = jax.jit(jax.shard_map(train, mesh=MESH, check_vma=check, **specs))

    def run(*batches):
        grads, losses = (np.stack(each).astype(np.float32) for each in zip(*batches, strict=True))
        (first, second), read = step(PARAMS, grads, losses)
        found = {"first": first, "second": second, **read}
        return {name: np.asarray(value) for name, value in found.items()}

    return run


OPTIMIZERS = {
    "adagc": lambda **o: optax.chain(heal(policies.ADAGC, **o), optax.sgd(0.1)),
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

    # With check_vma, jax's default, just the same; and what it is without an axis.
    checked = compiled(OPTIMIZERS["protect"], split=True, check=True)(GOOD, BAD_LOSS)
    assert same(checked, "skip")
    alone = compiled(lambda **o: protect(optax.sgd(0.1), policies.ZCLIP), split=False)
    assert alone(GOOD, BAD_LOSS)["skip"].tolist() == [False, True, False, False]


SGD = optax.sgd(0.1)
TRANSFORMATIONS = {
    "heal_zclip": lambda: optax.chain(heal_zclip(), SGD),
    "protect": lambda: protect(SGD),
    "pretraining": lambda: protect(SGD, "pretraining"),
    "line_search": lambda: protect(optax.lbfgs()),
}
TREE = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), "b": jnp.zeros(8)}


def loss_fn(params: Any) -> jax.Array:
    """A convex function of `TREE`."""
    return jnp.sum(params["w"] ** 2) + jnp.sum((params["b"] - 1) ** 2)


def flows_of(root: Any, name: str) -> None:
    """Compares each flow with a loop of Python; step 1 has a NaN gradient."""
    del root
    tx = TRANSFORMATIONS[name]()

    def step(carry: Any) -> Any:
        p, state, i = carry
        value, grads = jax.value_and_grad(loss_fn)(p)
        grads = jax.tree.map(lambda g: jnp.where(i == 1, jnp.nan, g), grads)
        updates, state = tx.update(grads, state, p, value=value, grad=grads, value_fn=loss_fn)
        return optax.apply_updates(p, updates), state, i + 1

    def scan(carry: Any, length: int = 3) -> Any:
        return lax.scan(lambda c, _: (step(c), None), carry, length=length)[0]

    def loop(carry: Any, body: Any = step) -> Any:
        return lax.while_loop(lambda c: c[2] < 3, body, carry)

    def lanes(function: Any) -> Any:
        return lambda c: jax.tree.map(
            lambda x: x[1], jax.vmap(function)(jax.tree.map(lambda x: jnp.stack([x, x]), c))
        )

    flows = {
        "scan": scan,
        "while_loop": loop,
        "fori_loop": lambda c: lax.fori_loop(0, c[2] + 3, lambda _, c: step(c), c),
        "cond": lambda c: scan(lax.cond(c[2] < 1, step, lambda c: c, c), 2),
        "scan in while": lambda c: loop(c, lambda c: scan(c, 1)),
        "while in vmap": lanes(loop),
        "while in cond": lambda c: lax.cond(c[2] < 1, loop, lambda c: c, c),
    }
    start = (TREE, tx.init(TREE), jnp.int32(0))
    wanted = step(step(step(start)))

    def check(flow: str, found: Any) -> None:
        same = jax.tree.map(
            lambda a, b: np.allclose(a, b, 1e-5, 1e-5, equal_nan=True), found[0], wanted[0]
        )
        assert all(jax.tree.leaves(same)), flow

    for flow, function in flows.items():
        check(flow, jax.jit(function)(start))

    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)

    def sharding(leaf: Any) -> NamedSharding:
        for axis, size in enumerate(leaf.shape):
            for names in (("a", "b"), ("a",)):
                if size and size % 2 ** len(names) == 0:
                    return NamedSharding(mesh, PartitionSpec(*[None] * axis, names))
        return NamedSharding(mesh, PartitionSpec())

    shardings = jax.tree.map(sharding, start)
    split = [each for each in jax.tree.leaves(shardings[1]) if any(each.spec)]
    assert split, "no leaf of the healing state is sharded"
    compiled = jax.jit(step, in_shardings=(shardings,), out_shardings=shardings)
    check("sharded", compiled(compiled(compiled(jax.device_put(start, shardings)))))


def explicit(root: Any) -> None:
    """Trains on a mesh of explicit axes, the default of `jax.make_mesh`; step 1 has a NaN."""
    del root
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Explicit,))

    def trained(tx: Any, place: Any) -> Any:
        @jax.jit
        def step(params: Any, state: Any, i: Any) -> Any:
            loss, grads = jax.value_and_grad(loss_fn)(params)
            grads = jax.tree.map(lambda g: jnp.where(i == 1, jnp.nan, g), grads)
            updates, state = tx.update(grads, state, params, value=loss)
            return optax.apply_updates(params, updates), state

        params = jax.tree.map(place, TREE)
        state = jax.jit(tx.init)(params)
        seen = []
        for i in range(3):
            params, state = step(params, state, i)
            seen.append(params)
        for leaf, start in zip(*map(jax.tree.leaves, (params, TREE)), strict=True):
            assert leaf.sharding.is_equivalent_to(place(start).sharding, leaf.ndim)
        assert int(metrics(state)["heal/skips"]) == 1
        return jax.tree.map(np.asarray, seen)

    transformations = {
        "adagc": OPTIMIZERS["adagc"],
        "no clip": lambda: protect(optax.adam(0.1)),
        "fixed clip": lambda: protect(optax.adam(0.1), clip={"max_norm": 1.0}),
    }

    def on_each_device(leaf: Any) -> Any:
        return jax.device_put(leaf, NamedSharding(mesh, SPLIT))

    for name, make in transformations.items():
        alone = trained(make(), jnp.asarray)
        with jax.set_mesh(mesh):
            sharded = trained(make(), on_each_device)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6, err_msg=name)
        jax.tree.map(close, sharded, alone)
        if name != "adagc":  # In a chain the moments of a skipped step decay.
            jax.tree.map(np.testing.assert_array_equal, sharded[1], sharded[0])
