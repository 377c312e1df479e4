"""Train states, optimizer states, keys: saved and restored."""

import os
from typing import Any

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from orbax.checkpoint import v1 as orbax

from healcore.runtime.store.checkpoints import StateMismatch, UnsavableState
from healcore.runtime.store.store import CheckpointStore
from tests import forked_programs
from tests.runtime.store.store_cases import (
    JAX_MEMORY,
    JAX_TIERS,
    ORBAX,
    PinningFormat,
    StoreCase,
    over,
    same,
)

# As on an accelerator: arrays go to pinned host memory by themselves. Here it is a CPU's.
PINNED = StoreCase("jax-pinned", lambda root: CheckpointStore(PinningFormat()), in_jax=True)
CASES = (ORBAX, JAX_MEMORY, JAX_TIERS, PINNED)


def back(case: StoreCase, root: Any, state: dict[str, Any], like: Any = None) -> dict[str, Any]:
    """A state, saved and restored into `like` or itself."""
    store = case.make(root)
    store.save(1, state)
    store.wait()
    return store.restore(1, like or state).state


@flax.struct.dataclass
class Carry:
    trained: Any
    step: int


@over(*CASES)
def test_any_pytree_keeps_its_type(case, tmp_path):
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    tx = optax.adamw(1e-3)
    tree = {
        "linen": TrainState.create(apply_fn=model.apply, params=params, tx=tx),
        "own": Carry(({"a": (jnp.ones(2), [None, jnp.zeros(())])}, tx.init(params)), 7),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        "bare": jnp.arange(3),
    }
    found = back(case, tmp_path, tree)
    for name, value in tree.items():
        assert jax.tree.structure(found[name]) == jax.tree.structure(value), name
        assert same(jax.tree.leaves(value), jax.tree.leaves(found[name])), name


@over(*CASES)
def test_arrays_of_jax_and_numpy_stand_for_each_other_and_names_may_be_odd(case, tmp_path):
    names = ["a/b", "a.b", "..", "", " ", "%2F", "ü", "a", "A", "x" * 100, "[0]", "a#2", "\n"]
    tree: dict[str, Any] = {name: jnp.full(2, i) for i, name in enumerate(names)}
    tree["a "] = {"b": jnp.full(2, 99)}
    saved = {"a": jnp.arange(3), "b": np.arange(3, dtype=np.int32)}
    like = {"a": np.zeros(3, np.int32), "b": jnp.zeros(3, jnp.int32)}
    state = {"tree": tree, "t/r": tree}
    found = back(case, tmp_path, {**state, "x": saved}, {**state, "x": like})
    assert same(tree, found["tree"])
    assert same(tree, found["t/r"])
    assert type(found["x"]["a"]) is np.ndarray
    assert isinstance(found["x"]["b"], jax.Array)
    assert found["x"]["a"].tolist() == found["x"]["b"].tolist() == [0, 1, 2]


@over(*CASES)
def test_what_cannot_be_saved_or_does_not_fit_is_refused(case, tmp_path):
    store = case.make(tmp_path)
    for bad in (lambda: 0, np.array(["text"]), np.array([object()])):
        with pytest.raises(UnsavableState, match=r"state\['x'\]\['f'\] is a"):
            store.save(1, {"x": {"f": bad}})
    assert store.checkpoints() == []
    store.save(1, {"key": jax.random.key(1)})
    store.wait()
    with pytest.raises(StateMismatch, match="rbg"):
        store.restore(1, {"key": jax.random.key(1, impl="rbg")})
    with pytest.raises(StateMismatch):
        store.restore(1, {"key": jnp.zeros(2, jnp.uint32)})
    assert same(jax.random.key(1), store.restore(1, {"key": jax.random.key(7)}).state["key"])


def test_the_arrays_of_a_checkpoint_are_orbax_s_own(tmp_path):
    """Readable without healcore."""
    back(ORBAX, tmp_path, {"params": {"dense": {"kernel": jnp.arange(3.0)}}})
    (folder,) = tmp_path.glob("step-*/data")
    found = orbax.load_checkpointables(str(folder))["state"]
    assert found["params.dense.kernel"].tolist() == [0, 1, 2]


@pytest.mark.slow
def test_sharded_arrays_on_eight_devices(tmp_path):
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    done = forked_programs.run("-m", "tests.jax.store.sharded_program", tmp_path, env=env)
    assert (done.returncode, done.stdout[-5:]) == (0, "fine\n"), done.stderr[-4000:]
