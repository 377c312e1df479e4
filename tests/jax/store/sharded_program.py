"""Arrays sharded over eight devices go through every store, with donation in between."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from healcore.runtime.store.store import CheckpointStore
from tests.runtime.store.store_cases import JAX_MEMORY, JAX_TIERS, ORBAX, PinningFormat, same

root = Path(sys.argv[1])
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))


def put(value, *spec):
    return jax.device_put(value, NamedSharding(mesh, P(*spec)))


def fresh():
    return {
        "both": put(jnp.arange(64.0).reshape(8, 8), "x", "y"),
        "rows": put(jnp.arange(64, dtype=jnp.bfloat16).reshape(8, 8), "x"),
        "columns": put(jnp.arange(64.0).reshape(8, 8), None, "y"),
        "everywhere": put(jnp.arange(5.0)),
        "scalar": put(jnp.float32(2.5)),
        "anywhere": jnp.float32(1.5),
        "one device": jax.device_put(jnp.arange(3), jax.devices()[5]),
        "key": jax.random.wrap_key_data(put(jnp.arange(2, dtype=jnp.uint32))),
    }


spoil = jax.jit(lambda leaf: leaf * 0 + 7, donate_argnums=0)


stores = {case.name: case.make(root / case.name) for case in (ORBAX, JAX_MEMORY, JAX_TIERS)}
for name, store in {**stores, "pinned": CheckpointStore(PinningFormat())}.items():
    state = fresh()
    store.save(1, {"x": state})
    for key, leaf in state.items():
        if key != "key":
            jax.block_until_ready(spoil(leaf))
    store.wait()
    store.verify(1)
    if name == "jax-memory":
        # Of replicas one is copied. (Every part is rounded up to 64 bytes.)
        assert store.checkpoints()[0].bytes < 1500, store.checkpoints()
    for _ in range(2):
        found = store.restore(1, {"x": fresh()}).state["x"]
        for key, leaf in fresh().items():
            assert found[key].sharding == leaf.sharding, (name, key, found[key].sharding)
            assert found[key].committed == leaf.committed, (name, key)
            assert same(found[key], leaf), (name, key)
            if key != "key":  # donating what was restored reaches neither store nor replicas
                jax.block_until_ready(spoil(found[key]))
        store.verify(1)
    # Into another sharding.
    other = {"x": {**fresh(), "rows": put(jnp.zeros((8, 8), jnp.bfloat16), None, "x")}}
    found = store.restore(1, other).state["x"]["rows"]
    assert found.sharding == other["x"]["rows"].sharding
    assert (np.asarray(found) == np.asarray(fresh()["rows"])).all()
    bad = fresh()
    bad["both"] = put(jnp.ones((8, 8)).at[7, 7].set(jnp.inf), "x", "y")
    store.save(2, {"x": bad})
    store.wait()
    assert store.take_nonfinite() == [(2, ("x.both",))], store.checkpoints()
print("fine")
