"""Memory first, then disk."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from healcore.runtime.store import CheckpointDamaged, Keep
from tests.runtime.store.disk_faults import flip
from tests.runtime.store.store_cases import (
    TIERS,
    damage_in_memory,
    forget,
    held_bytes,
    over,
    same_states,
)


@over(*TIERS)
def test_a_damaged_copy_in_memory_is_replaced_by_the_one_on_disk(case, tmp_path):
    store = case.make(tmp_path)
    store.save(7, case.state(1))
    store.wait()
    name = damage_in_memory(store, 7)
    assert same_states(case.state(1), store.restore(7, case.state(2)).state)
    assert any("memory" in str(each) and name in str(each) for each in store.trouble())
    assert store.steps()[0].path is not None
    assert store.steps_in_memory() == set()


@over(*TIERS)
def test_the_copy_in_memory_serves_for_a_damaged_one_on_disk(case, tmp_path):
    store = case.make(tmp_path)
    store.save(7, case.state(1))
    store.wait()
    flip(Path(store.steps()[0].path) / "state.json", 17)
    assert same_states(case.state(1), store.restore(7, case.state(2)).state)
    forget(store)
    with pytest.raises(CheckpointDamaged):
        store.restore(7, case.state(1))


@over(*TIERS)
def test_memory_is_not_used_again_while_it_is_written_to_disk(case, tmp_path):
    """The small ring lets go of a snapshot long before the disk has it."""
    keep = Keep(good=1, candidates=2)
    store = case.make(tmp_path, in_memory=keep)
    for step in range(12):
        state = case.state(step)
        state["values"]["large"] = np.full(4 << 20, step, np.uint8)
        store.save(step, state)
        case.spoil(state)
    store.wait()
    assert [saved.step for saved in store.steps()] == list(range(12))
    for step in (0, 6):
        like = case.state(0)
        like["values"]["large"] = np.empty(4 << 20, np.uint8)
        found = case.make(tmp_path).restore(step, like).state
        assert set(np.unique(found["values"].pop("large"))) == {step}
        assert same_states(case.state(step), found)
    assert held_bytes(store) <= (keep.most + 2) * (5 << 20)
