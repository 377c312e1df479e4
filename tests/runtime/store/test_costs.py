"""The cost of a save, counted in bytes and in waits, never by the clock."""

from __future__ import annotations

import threading
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np
import pytest
import torch

from healcore.runtime.store import Keep, SaveFailed, host_memory
from tests.runtime.store.store_cases import (
    ALL,
    DISKS,
    JAX_TIERS,
    TIERS,
    TORCH_MEMORY,
    StoreCase,
    held_bytes,
    jax_state,
    over,
)

ARRAYS, SIDE = 12, 500
BYTES = ARRAYS * SIDE * SIDE * 4
SMALL = Keep(good=1, candidates=2)


def large(case: StoreCase) -> dict[str, Any]:
    """A state of twelve megabytes."""
    put = jax.device_put if case.state is jax_state else torch.from_numpy
    return {"weights": [put(np.full((SIDE, SIDE), i, np.float32)) for i in range(ARRAYS)]}


@contextmanager
def traced() -> Iterator[list[int]]:
    """The most host memory that NumPy and Python held in the block, beyond what was there."""
    peak: list[int] = []
    tracemalloc.start(1)
    try:
        before, _ = tracemalloc.get_traced_memory()
        tracemalloc.reset_peak()
        yield peak
        peak.append(tracemalloc.get_traced_memory()[1] - before)
    finally:
        tracemalloc.stop()


@over(*ALL)
def test_a_save_takes_one_copy_and_the_next_one_uses_its_memory_again(case, tmp_path):
    store, state = case.make(tmp_path), large(case)
    with traced() as first:
        store.save(0, state)
    store.wait()
    assert BYTES <= first[0] < 1.5 * BYTES
    if case in DISKS:  # the others use memory again when their ring is full
        with traced() as second:
            store.save(1, state)
        store.wait()
        assert second[0] < 0.2 * BYTES


@over(*TIERS)
def test_tiers_take_the_copy_in_memory_to_disk_and_make_no_second_one(case, tmp_path):
    store, state = case.make(tmp_path, in_memory=SMALL), large(case)
    for step in range(6):
        store.save(step, state)
        store.wait()
        # One each for the ring, the one being taken, and the one on its way to disk.
        assert held_bytes(store) <= (SMALL.most + 2) * 1.1 * BYTES


@over(TORCH_MEMORY, JAX_TIERS)
def test_copies_that_do_not_fit_into_memory(case, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(host_memory, "free", lambda: 10_000)
    store = case.make(tmp_path)
    store.save(1, case.state(1))
    if store.durable:
        store.wait()
        assert [saved.step for saved in store.steps_on_disk()] == [1]
        assert "checkpoints go to disk only" in caplog.text
    else:
        with pytest.raises(SaveFailed, match="pass a directory"):
            store.wait()
    assert store.steps_in_memory() == set()


@over(*DISKS)
def test_save_does_not_wait_for_the_disk(case, tmp_path):
    """`save` returns before a byte is written, and the state can be changed at once."""
    store, gate = case.make(tmp_path), threading.Event()
    write = store._write

    def late(captured, folder):
        assert gate.wait(60)
        return write(captured, folder)

    store._write = late
    state = case.state(1)
    store.save(1, state)
    case.spoil(state)
    assert store.steps() == []
    assert store.failures() == []
    gate.set()
    store.wait()
    assert [saved.step for saved in store.steps()] == [1]
