"""After a rollback a run repeats the same steps and saves them again."""

from __future__ import annotations

import pytest

from healcore.runtime.recovery.checkpoint_choice import saved_after
from healcore.runtime.store import Keep, LastGoodKept
from tests.runtime.store.store_cases import (
    ALL,
    DISKS,
    TIERS,
    StoreCase,
    over,
    prune,
    same_states,
)


@pytest.fixture
def store(case: StoreCase, tmp_path):
    return case.make(tmp_path / "checkpoints")


def save(case: StoreCase, store, step: int, seed: int) -> None:
    store.save(step, case.state(seed), healing={"seed": seed})
    store.wait()


def holds(case: StoreCase, store, step: int, seed: int) -> bool:
    """Whether the save that counts for a step is the one of that seed."""
    restored = store.restore(step, case.state(0))
    return restored.healing == {"seed": seed} and same_states(case.state(seed), restored.state)


def statuses(store) -> list[tuple[int, str]]:
    return [(saved.step, saved.status) for saved in store.steps()]


def roll_back(store, target: int) -> None:
    """The Healer's treatment of the saves after its rollback target."""
    for step in saved_after(store.steps(), onset=target):
        store.mark(step, "quarantined")


@over(*ALL)
def test_a_rollback_and_the_same_steps_again(case, store):
    for step in (1, 2, 3):
        save(case, store, step, seed=step)
    store.mark(1, "good")
    roll_back(store, 1)
    assert statuses(store) == [(1, "good"), (2, "quarantined"), (3, "quarantined")]
    save(case, store, 2, seed=12)
    assert statuses(store) == [(1, "good"), (2, "candidate"), (3, "quarantined")]
    assert holds(case, store, 2, seed=12)
    store.mark(2, "good")
    assert statuses(store) == [(1, "good"), (2, "good"), (3, "quarantined")]
    assert holds(case, store, 2, seed=12)
    save(case, store, 3, seed=13)
    roll_back(store, 2)
    assert statuses(store) == [(1, "good"), (2, "good"), (3, "quarantined")]
    save(case, store, 3, seed=23)
    assert statuses(store)[-1] == (3, "candidate")
    assert holds(case, store, 3, seed=23)
    assert store.damaged() == []


@over(*DISKS)
@pytest.mark.parametrize("done", [0, 1, 2])
def test_a_quarantine_that_a_crash_cut_short_is_finished(case, tmp_path, done):
    store = case.make(tmp_path)
    for step in (1, 2, 3):
        save(case, store, step, seed=step)
    store.mark(1, "good")
    for step in (2, 3)[:done]:
        store.mark(step, "quarantined")
    again = case.make(tmp_path)
    roll_back(again, 1)
    assert statuses(again) == [(1, "good"), (2, "quarantined"), (3, "quarantined")]


@over(*DISKS)
def test_the_last_known_good_one_is_not_lost_to_a_newer_save_of_its_step(case, store):
    """It is behind the newer one until that is good too, and back when that proves bad."""
    save(case, store, 7, seed=1)
    store.mark(7, "good")
    save(case, store, 7, seed=2)
    assert statuses(store) == [(7, "candidate")]
    store.mark(7, "quarantined")
    assert statuses(store) == [(7, "good")]
    assert holds(case, store, 7, seed=1)
    save(case, store, 7, seed=3)
    store.delete(7)
    assert statuses(store) == [(7, "good")]
    with pytest.raises(LastGoodKept):
        store.delete(7)
    save(case, store, 7, seed=4)
    store.mark(7, "good")
    assert holds(case, store, 7, seed=4)
    save(case, store, 8, seed=5)
    store.mark(8, "good")
    store.delete(7)
    assert statuses(store) == [(8, "good")]


@over(*DISKS)
def test_superseded_saves_are_removed(case, store):
    save(case, store, 1, seed=0)
    store.mark(1, "good")
    for seed in range(3):
        for step in (2, 3):
            save(case, store, step, seed=10 * seed + step)
        roll_back(store, 1)
    folders = sorted(path.name.split(".")[0] for path in store.root.iterdir())
    assert folders == [f"step-000000000{step}" for step in (1, 2, 3)]
    store.delete(3)
    assert statuses(store) == [(1, "good"), (2, "quarantined")]


@over(*TIERS)
def test_an_older_save_on_disk_is_another_one(case, tmp_path):
    """As after a failed write to disk: memory and disk have different saves of one step."""
    store = case.make(tmp_path)
    save(case, store, 1, seed=1)
    save(case, store.memory, 2, seed=2)
    save(case, store, 3, seed=3)
    store.mark(1, "good")
    roll_back(store, 1)
    save(case, store.memory, 3, seed=13)
    assert statuses(store) == [(1, "good"), (2, "quarantined"), (3, "candidate")]
    assert holds(case, store, 3, seed=13)
    store.mark(3, "good")
    assert statuses(store)[-1] == (3, "good")
    assert statuses(store.disk) == [(1, "good"), (3, "quarantined")]
    # Gone from memory, it is the older one again.
    store.memory.drop(3)
    assert statuses(store)[-1] == (3, "quarantined")


@over(*TIERS)
def test_the_last_known_good_one_on_disk_stays_however_many_memory_has(case, tmp_path):
    store = case.make(tmp_path, keep=Keep(good=3, candidates=2))
    for step in range(5):
        save(case, store.memory if step else store, step, seed=step)
        store.mark(step, "good")
    assert prune(store, Keep(good=2)) == [2]  # 1 has left the ring already
    again = case.make(tmp_path)  # the machine went down
    assert statuses(again) == [(0, "good")]
