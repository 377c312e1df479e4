"""Train states, optimizer states, keys: saved and restored, with donation in between."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from typing import Any, NamedTuple

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import healcore.jax
from healcore.runtime.store import CheckpointStore, StateMismatch, UnsavableState
from tests.runtime.store.programs import finish, start
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


def optimizer() -> Any:
    return healcore.jax.protect(
        optax.chain(
            optax.clip_by_global_norm(1.0),
            optax.inject_hyperparams(optax.adamw)(optax.cosine_decay_schedule(1e-2, 50)),
        ),
        policy="zclip",
    )


@jax.jit
def loss_of(params: Any, key: Any) -> Any:
    noise = jax.random.bernoulli(key, 0.5, params["w"].shape)
    return jnp.mean((params["w"] * noise - 1) ** 2)


TX = optimizer()


def _step(params: Any, state: Any, key: Any) -> Any:
    key, now = jax.random.split(key)
    loss, grads = jax.value_and_grad(loss_of)(params, now)
    updates, state = TX.update(grads, state, params, value=loss)
    return optax.apply_updates(params, updates), state, key, loss


# Donated: what was saved is overwritten by the very next step.
step = jax.jit(_step, donate_argnums=(0, 1, 2))


def test_a_run_replays_bit_for_bit_though_every_step_donates(tmp_path):
    for case in CASES:
        params = {"w": jnp.linspace(-1, 1, 4096).reshape(64, 64)}
        state, key = TX.init(params), jax.random.key(0)
        store = case.make(tmp_path / case.name)
        for _ in range(3):
            params, state, key, _ = step(params, state, key)
        store.save(3, {"params": params, "opt": state, "key": key})
        first = []
        for _ in range(4):
            params, state, key, loss = step(params, state, key)
            first.append(float(loss))
        like = {"params": params, "opt": state, "key": key}
        for _ in range(2):
            found = store.restore(3, like).state
            params, state, key = found["params"], found["opt"], found["key"]
            again = []
            for _ in range(4):
                params, state, key, loss = step(params, state, key)
                again.append(float(loss))
            assert again == first, case.name
            like = {"params": params, "opt": state, "key": key}
            store.verify(3)


class Trained(NamedTuple):
    params: Any
    opt_state: Any


@flax.struct.dataclass
class Carry:
    trained: Trained
    step: int


@over(*CASES)
def test_any_pytree_keeps_its_type(case, tmp_path):
    model = nn.Dense(3)
    params = model.init(jax.random.key(0), jnp.ones((1, 4)))
    tx = optax.adamw(1e-3)
    tree = {
        "linen": TrainState.create(apply_fn=model.apply, params=params, tx=tx),
        "own": Carry(Trained({"a": (jnp.ones(2), [None, jnp.zeros(())])}, tx.init(params)), 7),
        "nnx": nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0))),
        "bare": jnp.arange(3),
    }
    store = case.make(tmp_path)
    store.save(1, tree)
    store.wait()
    found = store.restore(1, tree).state
    for name, value in tree.items():
        assert jax.tree.structure(found[name]) == jax.tree.structure(value), name
        assert same(jax.tree.leaves(value), jax.tree.leaves(found[name])), name


class Position(NamedTuple):
    epoch: int
    seen: jax.Array


class Loader:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state


@over(*CASES)
def test_what_an_object_holds_keeps_its_type(case, tmp_path):
    value = {
        "defaults": defaultdict(int, a=1),
        "named": Position(3, jnp.arange(2)),
        "ordered": OrderedDict(a=(1, [2]), b=Counter("aba")),
        "number": np.float32(0.5),
        "array": np.arange(3),
        "key": jax.random.key(0),
    }
    store = case.make(tmp_path)
    store.save(1, {"loader": Loader(value)})
    store.wait()
    found = store.restore(1, {"loader": Loader(value)}).state["loader"]
    assert [type(each) for each in found.values()] == [type(each) for each in value.values()]
    assert found["defaults"].default_factory is int
    assert type(found["named"].seen) is type(value["named"].seen)
    assert [type(each) for each in found["ordered"].values()] == [tuple, Counter]
    for lost in (np.ma.masked_array([1.0], [True]), type("Settings", (dict,), {})(a=1)):
        with pytest.raises(UnsavableState, match=r"state\['loader'\]\['last'\] is a "):
            store.save(2, {"loader": Loader({"last": lost})})


@over(*CASES)
def test_jax_and_numpy_arrays_stand_for_each_other(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, {"x": {"a": jnp.arange(3), "b": np.arange(3, dtype=np.int32)}})
    store.wait()
    found = store.restore(1, {"x": {"a": np.zeros(3, np.int32), "b": jnp.zeros(3, jnp.int32)}})
    assert type(found.state["x"]["a"]) is np.ndarray
    assert isinstance(found.state["x"]["b"], jax.Array)
    assert found.state["x"]["a"].tolist() == found.state["x"]["b"].tolist() == [0, 1, 2]


@over(*CASES)
def test_names_that_file_systems_do_not_like(case, tmp_path):
    names = ["a/b", "a.b", "..", "", " ", "%2F", "ü", "a", "A", "x" * 100, "[0]", "a#2", "\n"]
    tree: dict[str, Any] = {name: jnp.full(2, i) for i, name in enumerate(names)}
    tree["a "] = {"b": jnp.full(2, 99)}
    store = case.make(tmp_path)
    store.save(1, {"tree": tree, "t/r": tree})
    store.wait()
    found = store.restore(1, {"tree": tree, "t/r": tree}).state
    assert same(tree, found["tree"])
    assert same(tree, found["t/r"])


@over(*CASES)
def test_keys_of_another_kind_do_not_fit(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, {"key": jax.random.key(1)})
    store.wait()
    with pytest.raises(StateMismatch, match="rbg"):
        store.restore(1, {"key": jax.random.key(1, impl="rbg")})
    with pytest.raises(StateMismatch):
        store.restore(1, {"key": jnp.zeros(2, jnp.uint32)})
    assert same(jax.random.key(1), store.restore(1, {"key": jax.random.key(7)}).state["key"])


@over(*CASES)
def test_an_entry_that_cannot_be_saved_is_named(case, tmp_path):
    store = case.make(tmp_path)
    for bad in (lambda: 0, np.array(["text"]), np.array([object()])):
        with pytest.raises(UnsavableState, match=r"state\['x'\]\['f'\] is a"):
            store.save(1, {"x": {"f": bad}})
    assert store.steps() == []


def test_the_arrays_of_a_checkpoint_are_orbax_s_own(tmp_path):
    """Readable without healcore."""
    from pathlib import Path

    from orbax.checkpoint import v1 as ocp

    store = ORBAX.make(tmp_path)
    store.save(1, {"params": {"dense": {"kernel": jnp.arange(3.0)}}})
    store.wait()
    folder = Path(store.steps()[0].path or "") / "data"
    found = ocp.load_checkpointables(str(folder))["state"]
    assert found["params.dense.kernel"].tolist() == [0, 1, 2]


def test_sharded_arrays_on_eight_devices(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    program = "tests.jax.store.sharded_program"
    finish(start(program, tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))
