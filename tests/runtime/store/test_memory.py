"""Copies in host memory: their cost, their place beside the disk, and NaN in every float format."""

import threading
import tracemalloc
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from healcore.runtime.store import store as stores
from healcore.runtime.store.array_format import finite
from healcore.runtime.store.checkpoints import CheckpointDamaged, Keep, SaveFailed
from healcore.runtime.store.manifest import STATE
from tests.runtime.store.disk_faults import before_completion, flip
from tests.runtime.store.store_cases import (
    ALL,
    DISKS,
    JAX_TIERS,
    TIERS,
    TORCH_MEMORY,
    StoreCase,
    forget,
    held_bytes,
    over,
    same_states,
)

ARRAYS, SIDE = 12, 500
BYTES = ARRAYS * SIDE * SIDE * 4
SMALL = Keep(good=1, candidates=2)


def large(case: StoreCase) -> dict[str, Any]:
    put = jax.device_put if case.in_jax else torch.from_numpy
    return {"weights": [put(np.full((SIDE, SIDE), i, np.float32)) for i in range(ARRAYS)]}


def peak_of_save(store: Any, step: int, state: dict[str, Any]) -> int:
    """The most host memory that NumPy and Python allocated in a save, while nothing was written."""
    gate = threading.Event()
    store.submit(step, gate.wait)
    tracemalloc.start(1)
    try:
        store.save(step, state)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
        gate.set()
        store.wait()


@over(*ALL)
def test_a_save_takes_one_copy(case, tmp_path):
    assert peak_of_save(case.make(tmp_path), 0, large(case)) < 1.5 * BYTES


@over(*TIERS)
def test_memory_is_not_used_again_while_it_is_written_to_disk(case, tmp_path):
    """The small ring lets go of a snapshot long before the disk has it."""
    store = case.make(tmp_path, in_memory=SMALL)
    for step in range(12):
        state = case.state(step)
        state["values"]["large"] = np.full(4 << 20, step, np.uint8)
        store.save(step, state)
        case.spoil(state)
        if step % 4 == 0:
            # One each for the ring, the one being taken, and the one on its way to disk.
            assert held_bytes(store) <= (SMALL.most + 2) * (5 << 20)
    store.wait()
    assert [saved.step for saved in store.checkpoints()] == list(range(12))
    for step in (0, 6):
        like = case.state(0)
        like["values"]["large"] = np.empty(4 << 20, np.uint8)
        found = case.make(tmp_path).restore(step, like).state
        assert set(np.unique(found["values"].pop("large"))) == {step}
        assert same_states(case.state(step), found)


@over(TORCH_MEMORY, JAX_TIERS)
def test_copies_that_do_not_fit_into_memory(case, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(stores, "free_bytes", lambda: 10_000)
    store = case.make(tmp_path)
    store.save(1, case.state(1))
    if store.durable:
        store.wait()
        assert store.steps_on_disk() == [1]
        assert "checkpoints go to disk only" in caplog.text
    else:
        with pytest.raises(SaveFailed, match="pass a directory"):
            store.wait()
    assert not store.copies


@over(*DISKS)
def test_save_does_not_wait_for_the_disk(case, tmp_path, monkeypatch):
    store = case.make(tmp_path)
    gate = threading.Event()
    before_completion(monkeypatch, lambda checkpoint: gate.wait(60))
    store.save(1, case.state(1))
    assert store.checkpoints() == store.take_failures() == []
    gate.set()
    store.wait()
    assert [saved.step for saved in store.checkpoints()] == [1]


@over(*TIERS)
def test_memory_and_disk_stand_for_each_other(case, tmp_path):
    store = case.filled(tmp_path, 7, 8)
    flip(Path(store.checkpoints()[1].path) / STATE, 17)
    assert same_states(case.state(8), store.restore(8, case.state(2)).state)
    forget(store)
    with pytest.raises(CheckpointDamaged):
        store.restore(8, case.state(1))


FLOATS = [
    np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip


def is_finite(array: np.ndarray) -> bool:
    return finite(array.reshape(-1).view(np.uint8), array.dtype.name)


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_one_bad_number_at_any_place_is_found(dtype):
    for at, number in ((0, np.nan), (1000, -np.inf), (-1, np.inf), (-1, np.nan)):
        array = np.ones(1 << 14, dtype)
        array[3:6] = (-0.0, 1e-45, 3.4e38) if np.dtype(dtype).itemsize > 2 else 1
        assert is_finite(array)
        array[at] = number
        assert not is_finite(array), (at, number)
    if np.dtype(dtype).itemsize <= 2:  # every bit pattern
        bits = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
        for pattern in range(np.iinfo(bits).max + 1):
            array = np.array([pattern], bits).view(dtype)
            assert is_finite(array) == bool(np.isfinite(array.astype(np.float32))[0]), pattern


def test_whole_numbers_are_finite_and_the_names_are_those_of_the_frameworks():
    for dtype in (np.int8, np.uint64, np.bool_, ml_dtypes.int4):
        assert is_finite(np.array([1, 0, 1]).astype(dtype))
    assert is_finite(np.zeros(0, np.float32))
    for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
        assert str(getattr(torch, name)) == f"torch.{name}"
        assert jnp.dtype(name).name == name
