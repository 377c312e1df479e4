"""Train states, optimizer states, keys: saved and restored, with donation in between."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from functools import partial
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
from orbax.checkpoint import v1 as orbax

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


# Donated: what was saved is overwritten by the very next step.
@partial(jax.jit, donate_argnums=0)
def step(run: dict[str, Any]) -> Any:
    key, now = jax.random.split(run["key"])
    loss, grads = jax.value_and_grad(loss_of)(run["params"], now)
    updates, opt = TX.update(grads, run["opt"], run["params"], value=loss)
    return {"params": optax.apply_updates(run["params"], updates), "opt": opt, "key": key}, loss


def train(run: dict[str, Any], steps: int) -> tuple[dict[str, Any], list[float]]:
    losses = []
    for _ in range(steps):
        run, loss = step(run)
        losses.append(float(loss))
    return run, losses


def test_a_run_replays_bit_for_bit_though_every_step_donates(tmp_path):
    for case in CASES:
        params = {"w": jnp.linspace(-1, 1, 4096).reshape(64, 64)}
        store = case.make(tmp_path / case.name)
        run, _ = train({"params": params, "opt": TX.init(params), "key": jax.random.key(0)}, 3)
        store.save(3, run)
        run, losses = train(run, 4)
        for _ in range(2):
            run, again = train(store.restore(3, run).state, 4)
            assert again == losses, case.name
            store.verify(3)


def back(case: StoreCase, root: Any, state: dict[str, Any], like: Any = None) -> dict[str, Any]:
    """A state, saved and restored into `like` or itself."""
    store = case.make(root)
    store.save(1, state)
    store.wait()
    return store.restore(1, like or state).state


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
    found = back(case, tmp_path, tree)
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
    found = back(case, tmp_path, {"loader": Loader(value)})["loader"]
    assert [type(each) for each in found.values()] == [type(each) for each in value.values()]
    assert found["defaults"].default_factory is int
    assert type(found["named"].seen) is type(value["named"].seen)
    assert [type(each) for each in found["ordered"].values()] == [tuple, Counter]
    for lost in (np.ma.masked_array([1.0], [True]), type("Settings", (dict,), {})(a=1)):
        with pytest.raises(UnsavableState, match=r"state\['loader'\]\['last'\] is a "):
            case.make(tmp_path).save(2, {"loader": Loader({"last": lost})})


@over(*CASES)
def test_jax_and_numpy_arrays_stand_for_each_other(case, tmp_path):
    saved = {"a": jnp.arange(3), "b": np.arange(3, dtype=np.int32)}
    like = {"a": np.zeros(3, np.int32), "b": jnp.zeros(3, jnp.int32)}
    found = back(case, tmp_path, {"x": saved}, {"x": like})["x"]
    assert type(found["a"]) is np.ndarray
    assert isinstance(found["b"], jax.Array)
    assert found["a"].tolist() == found["b"].tolist() == [0, 1, 2]


@over(*CASES)
def test_names_that_file_systems_do_not_like(case, tmp_path):
    names = ["a/b", "a.b", "..", "", " ", "%2F", "ü", "a", "A", "x" * 100, "[0]", "a#2", "\n"]
    tree: dict[str, Any] = {name: jnp.full(2, i) for i, name in enumerate(names)}
    tree["a "] = {"b": jnp.full(2, 99)}
    found = back(case, tmp_path, {"tree": tree, "t/r": tree})
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
    back(ORBAX, tmp_path, {"params": {"dense": {"kernel": jnp.arange(3.0)}}})
    (folder,) = tmp_path.glob("step-*/data")
    found = orbax.load_checkpointables(str(folder))["state"]
    assert found["params.dense.kernel"].tolist() == [0, 1, 2]


def test_sharded_arrays_on_eight_devices(tmp_path):
    flags = "--xla_force_host_platform_device_count=8"
    program = "tests.jax.store.sharded_program"
    finish(start(program, tmp_path, XLA_FLAGS=flags, JAX_PLATFORMS="cpu"))
