"""After a rollback a run repeats the same steps and saves them again."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import Course
from tests.runtime.store.disk_faults import read_only
from tests.runtime.store.store_cases import ALL, DISKS, TIERS, StoreCase, over, same_states


@pytest.fixture
def store(case: StoreCase, tmp_path):
    return case.make(tmp_path)


def save(case: StoreCase, store, step: int, seed: int, *attempts: int) -> None:
    healing = {"seed": seed, "attempts": [0, *attempts], "proven": 1}
    store.save(step, case.state(seed), healing=healing)
    store.wait()


def holds(case: StoreCase, store, step: int, seed: int) -> bool:
    """Whether the save that counts for a step is the one of that seed."""
    restored = store.restore(step, case.state(0))
    return restored.healing["seed"] == seed and same_states(case.state(seed), restored.state)


def statuses(store) -> list[tuple[int, str]]:
    return [(saved.step, saved.status) for saved in store.steps()]


def roll_back(store, target: int, *attempts: int) -> None:
    """The Healer's commit of a rollback."""
    store.commit(target, {**store.healings()[target], "attempts": [0, *attempts]})


@over(*ALL)
def test_a_rollback_and_the_same_steps_again(case, store):
    for step in (1, 2, 3):
        save(case, store, step, step)
    roll_back(store, 1, 1)
    if store.durable:  # memory deletes them at once
        assert statuses(store) == [(1, "good"), (2, "abandoned"), (3, "abandoned")]
    save(case, store, 2, 12, 1)
    assert statuses(store)[:2] == [(1, "good"), (2, "candidate")]
    assert holds(case, store, 2, 12)
    save(case, store, 3, 13, 1)
    assert statuses(store) == [(1, "good"), (2, "candidate"), (3, "candidate")]
    assert holds(case, store, 3, 13)
    assert store.damaged() == []


@over(*DISKS)
def test_the_save_of_a_step_replaces_the_older_one(case, store):
    save(case, store, 1, 1)
    save(case, store, 1, 2)
    save(case, store, 2, 3)
    save(case, store, 2, 4, 1)
    names = sorted(path.name for path in store.root.iterdir())
    assert names == ["step-0000000001.1", "step-0000000002.2"]
    assert holds(case, store, 1, 2)
    assert holds(case, store, 2, 4)


@over(*TIERS)
def test_an_older_save_on_disk_is_another_one(case, tmp_path):
    """As after a failed write to disk: memory and disk have different saves of one step."""
    store = case.make(tmp_path)
    save(case, store, 1, 1)
    save(case, store, 3, 3)
    roll_back(store, 1, 1)
    with read_only(store.root):
        store.save(3, case.state(13), healing={"seed": 13, "attempts": [0, 1], "proven": 1})
        store.join()
    assert [failure.step for failure in store.failures()] == [3]
    assert statuses(store) == [(1, "good"), (3, "candidate")]
    assert holds(case, store, 3, 13)
    # Gone from memory, it is the older one again.
    store.delete(3)
    assert statuses(store)[-1] == (3, "abandoned")


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_what_was_saved_after_the_step_of_a_later_rollback_is_abandoned(bases, data):
    """Against a run that plays the attempts: which saves lead from the start to the end?"""
    attempts, saved, alive = [0], set(), set()
    for base in bases:
        last = data.draw(st.integers(attempts[-1], 12))
        new = {(step, len(attempts)) for step in range(attempts[-1], last + 1)}
        attempts.append(min(base, last))
        saved |= new
        alive = {(step, attempt) for step, attempt in alive | new if step <= attempts[-1]}
    course = Course(tuple(attempts))
    assert alive == {each for each in saved if not course.abandons(*each)}
