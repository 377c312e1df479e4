"""Runs one transformation in every control flow of JAX, and with a sharded state.

`run` is a scenario of `processes`: XLA can abort the process.
"""

# optax types every tree as the union of all trees, so that no leaf has an attribute.
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportArgumentType=false

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from healcore.jax import heal, heal_zclip, protect

SGD = optax.sgd(0.1)
TRANSFORMATIONS = {
    "heal_zclip": lambda: optax.chain(heal_zclip(), SGD),
    "heal": lambda: optax.chain(heal(), SGD),
    "protect": lambda: protect(SGD),
    "observe": lambda: protect(SGD, "observe"),
    "pretraining": lambda: protect(SGD, "pretraining"),
    "no_clip": lambda: protect(SGD, clip=None),
    "line_search": lambda: protect(optax.lbfgs()),
}
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 32).reshape(4, 8), "b": jnp.zeros(8)}


def loss_fn(params: Any) -> jax.Array:
    """A convex function of `PARAMS`."""
    return jnp.sum(params["w"] ** 2) + jnp.sum((params["b"] - 1) ** 2)


def run(root: Any, name: str) -> None:
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
        "fori_loop": lambda c: lax.fori_loop(0, 3, lambda _, c: step(c), c),
        "fori_loop, traced": lambda c: lax.fori_loop(0, c[2] + 3, lambda _, c: step(c), c),
        "cond": lambda c: scan(lax.cond(c[2] < 1, step, lambda c: c, c), 2),
        "vmap": lanes(scan),
        "scan in while": lambda c: loop(c, lambda c: scan(c, 1)),
        "while in vmap": lanes(loop),
        "while in cond": lambda c: lax.cond(c[2] < 1, loop, lambda c: c, c),
    }
    start = (PARAMS, tx.init(PARAMS), jnp.int32(0))
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
