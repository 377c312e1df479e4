"""Every store with a state of its framework, for the shared tests."""

import gc
import math
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import healcore.jax.store as jax_stores
import healcore.torch.store as torch_stores
from healcore import CheckpointStore, Keep
from healcore.jax.store.orbax import JaxFormat
from healcore.runtime.store.array_format import FlatState

KEEP = Keep(good=3, candidates=8)


class Cursor:
    """An object with state_dict, like a data loader's position."""

    def __init__(self, at: int = 0) -> None:
        self.at = at
        self.order = np.arange(5)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "order": self.order, "epoch": {0: "first", (1, 2): None}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.order = state["at"], state["order"]


def python_values() -> dict[str, Any]:
    """Python values and NumPy arrays that both frameworks must give back unchanged."""
    return {
        "nan": float("nan"),
        "text": "Zürich \n\x00",
        "list": [1, [2, []], (3, (4,))],
        "none": None,
        "numpy": np.arange(6, dtype=np.int16).reshape(2, 3),
        "number": np.float64(0.1),
    }


def torch_weights(seed: int) -> dict[str, Any]:
    random = torch.randn(7, 5, generator=torch.Generator().manual_seed(seed))
    return {
        "float32": random,
        "bfloat16": random.bfloat16(),
        "half": random.half(),
        "double": random.double(),
        "int64": torch.arange(9) + seed,
        "bool": random > 0,
        "scalar": torch.tensor(3.5 + seed),
        "empty": torch.zeros(0, 4),
        "strided": random.t()[::2],
        "nested": {"deeper": [random[0].clone(), (random[1].clone(), {})]},
    }


def jax_weights(seed: int) -> dict[str, Any]:
    random = jax.random.normal(jax.random.key(seed), (7, 5))
    return {
        "float32": random,
        "bfloat16": random.astype(jnp.bfloat16),
        "half": random.astype(jnp.float16),
        "float8": random.astype(jnp.float8_e4m3fn),
        "int32": jnp.arange(9) + seed,
        "bool": random > 0,
        "scalar": jnp.float32(3.5 + seed),
        "empty": jnp.zeros((0, 4)),
        "key": jax.random.key(seed),
        "nested": {"deeper": [random[0], (random[1], {})]},
    }


_donate = jax.jit(lambda leaf: jnp.full_like(leaf, 77), donate_argnums=0)


class PinningFormat(JaxFormat):
    """Copies arrays of a CPU to pinned host memory, as JAX copies them from a GPU."""

    def is_on_host(self, part: Any) -> bool:
        return not (isinstance(part, jax.Array) and part.size)


@dataclass(frozen=True)
class StoreCase:
    """One kind of store. `make` takes a directory."""

    name: str
    make: Callable[..., Any]
    in_jax: bool = False

    def state(self, seed: int = 0) -> dict[str, Any]:
        weights = jax_weights(seed) if self.in_jax else torch_weights(seed)
        return {"weights": weights, "values": python_values(), "cursor": Cursor(seed)}

    def with_nan(self, seed: int = 0) -> dict[str, Any]:
        state = self.state(seed)
        weights = state["weights"]
        if self.in_jax:
            weights["bfloat16"] = weights["bfloat16"].at[3, 3].set(jnp.nan)
        else:
            weights["bfloat16"][3, 3] = float("nan")
        return state

    def spoil(self, state: dict[str, Any]) -> None:
        """Overwrites everything in place, and donates JAX's arrays: their memory is used again."""
        for leaf in jax.tree.leaves(state["weights"]):
            if isinstance(leaf, torch.Tensor):
                leaf.zero_() if leaf.dtype == torch.bool else leaf.fill_(77)
            elif not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) and leaf.size:  # type: ignore[attr-defined]
                jax.block_until_ready(_donate(leaf))
        state["values"]["numpy"][:] = 77
        state["values"]["list"][1].append("spoilt")
        state["values"]["text"] = "spoilt"
        state["cursor"].order[:] = 77
        state["cursor"].at = 77

    def filled(self, root: Any, *steps: int, record: Any = None) -> Any:
        """A store with checkpoints of some steps, each of the state with that seed."""
        store = self.make(root)
        for step in steps:
            store.save(step, self.state(step), record=record)
            store.wait()
        return store


def in_files_of_the_framework(make: Callable[..., Any]) -> Callable[..., Any]:
    """Makes stores that save a small state as they save a large one."""

    def made(root: Any) -> Any:
        store = make(root)
        store.format.small_bytes = -1
        return store

    return made


DCP = StoreCase("dcp", in_files_of_the_framework(torch_stores.DCPStore))
ORBAX = StoreCase("orbax", in_files_of_the_framework(jax_stores.OrbaxStore), in_jax=True)
TORCH_FILE = StoreCase("torch-file", torch_stores.DCPStore)
JAX_FILE = StoreCase("jax-file", jax_stores.OrbaxStore, in_jax=True)
TORCH_MEMORY = StoreCase("torch-memory", lambda root: torch_stores.MemoryStore(KEEP))
JAX_MEMORY = StoreCase("jax-memory", lambda root: jax_stores.MemoryStore(KEEP), in_jax=True)
TORCH_TIERS = StoreCase("torch-tiers", partial(torch_stores.DCPStore, in_memory=KEEP))
JAX_TIERS = StoreCase("jax-tiers", partial(jax_stores.OrbaxStore, in_memory=KEEP), in_jax=True)

SINGLE_FILES = (TORCH_FILE, JAX_FILE)
DISKS = (DCP, ORBAX, *SINGLE_FILES)
TIERS = (TORCH_TIERS, JAX_TIERS)
ALL = (*DISKS, TORCH_MEMORY, JAX_MEMORY, *TIERS)


def named(name: str) -> StoreCase:
    return next(case for case in ALL if case.name == name)


def over(*cases: StoreCase) -> Any:
    return pytest.mark.parametrize("case", cases, ids=lambda case: case.name)


def forget(store: Any) -> None:
    """Empties the memory of a store, as a new process finds it."""
    store.copies = {}


def same(a: Any, b: Any) -> bool:
    """Bit for bit, of the same types, dtypes, shapes and structure."""
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        keys = [{(type(key), key) for key in each} for each in (a, b)]
        factories = {getattr(each, "default_factory", None) for each in (a, b)}
        alike = keys[0] == keys[1] and len(factories) == 1
        return alike and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple, deque)):
        of_one_length = len(a) == len(b) and getattr(a, "maxlen", 0) == getattr(b, "maxlen", 0)
        return of_one_length and all(map(same, a, b))
    if isinstance(a, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and _bits(a) == _bits(b)
    if isinstance(a, jax.Array):
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):  # type: ignore[attr-defined]
            return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
        return same(np.asarray(a), np.asarray(b))
    if isinstance(a, (np.ndarray, np.generic)):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    return a == b


def same_states(live: dict[str, Any], restored: dict[str, Any]) -> bool:
    """`same`, where the live state has the object and the restored one its state dictionary."""
    plain = {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in live.items()
    }
    return same(plain, restored)


def _bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def mark_good(store: CheckpointStore, step: int) -> None:
    """Makes a checkpoint and all older ones known-good."""
    record = {"attempts": [0], **store.records().get(step, {})}
    store.replace_record(step, {**record, "known_good_up_to": step})


def held_bytes(store: CheckpointStore) -> int:
    """Bytes of host memory of all copies."""
    store.wait()
    gc.collect()
    copies = [each for each in gc.get_objects() if type(each) is FlatState]
    leaves = [leaf for copy in copies for leaf in copy.leaves.values()]
    parts = {id(part): part for leaf in leaves for part in leaf.parts.values()}
    return sum(part.nbytes for part in parts.values())
