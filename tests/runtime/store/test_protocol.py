"""The same tests over every store."""

from __future__ import annotations

import json

import pytest

from healcore.runtime.store import (
    CheckpointNotFound,
    CheckpointStore,
    LastGoodKept,
    NotFinite,
    StateMismatch,
    StoreError,
)
from tests.runtime.recovery.simulated_run import Listed
from tests.runtime.store.store_cases import ALL, DISKS, Cursor, StoreCase, over, same_states

HEALING = {"schema": 1, "state": {"heal_step": 120}, "lr": 0.5}


@pytest.fixture
def store(case: StoreCase, tmp_path):
    return case.make(tmp_path / "checkpoints")


@over(*ALL)
def test_it_is_a_checkpoint_store(case, store):
    assert isinstance(store, CheckpointStore)
    assert store.steps() == []
    assert store.damaged() == []
    store.wait()


@over(*ALL)
def test_tiers(case, store):
    in_memory, on_disk = "memory" in case.name, case in DISKS
    assert (store.disk is None) == in_memory
    assert (store.memory is None) == on_disk
    assert (store.root is None) == in_memory
    assert [tier.durable for tier in store.tiers] == [False] * (not on_disk) + [True] * (
        not in_memory
    )
    assert all(tier.tiers == (tier,) for tier in store.tiers)


def test_a_store_of_your_own_needs_eight_methods():
    eight = "save steps verify restore mark delete wait failures"
    assert CheckpointStore.__abstractmethods__ == {*eight.split()}
    store = Listed()
    assert (store.tiers, store.disk, store.memory, store.root) == ((store,), store, None, None)
    assert store.nonfinite_in({}) == ()
    assert store.damaged() == store.trouble() == store.nonfinite_found() == []
    store.save(1, {}, healing={})
    store.take_out(1)
    assert [saved.status for saved in store.steps()] == ["quarantined"]


@over(*ALL)
def test_round_trip_is_exact(case, store):
    state = case.state(1)
    store.save(7, state, healing=HEALING)
    store.wait()
    restored = store.restore(7, case.state(2))
    assert same_states(case.state(1), restored.state)
    assert restored.healing == HEALING


@over(*ALL)
def test_changing_the_state_does_not_change_the_save(case, store):
    healing = json.loads(json.dumps(HEALING))
    state = case.state(1)
    store.save(7, state, healing=healing)
    case.spoil(state)
    healing["state"]["heal_step"] = -1
    store.wait()
    assert same_states(case.state(1), store.restore(7, case.state(1)).state)
    assert store.restore(7, case.state(1)).healing == HEALING


@over(*ALL)
def test_changing_a_restored_state_does_not_change_the_store(case, store):
    store.save(7, case.state(1))
    store.wait()
    first = store.restore(7, case.state(1)).state
    first["weights"] = dict(first["weights"])
    case.spoil({**first, "cursor": _Holder(first["cursor"])})
    store.verify(7)
    assert same_states(case.state(1), store.restore(7, case.state(1)).state)


class _Holder:
    """A restored cursor's arrays, in the form that `spoil` knows."""

    def __init__(self, state):
        self.order, self.at = state["order"], 0


@over(*ALL)
def test_one_save_after_another_without_waiting(case, store):
    for step in range(5):
        state = case.state(step)
        store.save(step, state)
        case.spoil(state)
    store.wait()
    assert [saved.step for saved in store.steps()] == [0, 1, 2, 3, 4]
    for step in range(5):
        assert same_states(case.state(step), store.restore(step, case.state(0)).state)


@over(*ALL)
def test_some_names_only(case, store):
    store.save(7, case.state(1))
    store.wait()
    restored = store.restore(7, {"values": case.state(2)["values"]})
    assert list(restored.state) == ["values"]
    assert restored.state["values"]["int"] == 2**70


class Newcomer(Cursor):
    """Stands for an entry that a Healer adds and that older or foreign checkpoints lack."""

    optional = True


@over(*ALL)
def test_optional_names_that_a_checkpoint_lacks_are_left_out(case, store):
    store.save(7, case.state(1))
    store.save(8, {**case.state(1), "healcore": Newcomer(5)})
    store.wait()
    like = {**case.state(2), "healcore": Newcomer()}
    assert same_states(case.state(1), store.restore(7, like).state)
    assert store.restore(8, like).state["healcore"]["at"] == 5
    assert store.restore(7, {"healcore": Newcomer()}).state == {}
    for same_but_needed in (Cursor(), {"optional": True}):
        with pytest.raises(StateMismatch, match='"healcore" is missing in the saved state'):
            store.restore(7, {**like, "healcore": same_but_needed})


@over(*ALL)
def test_without_healing_state(case, store):
    """Old checkpoints, and those of others, restore into a run that heals."""
    store.save(7, case.state(1))
    store.wait()
    assert not store.steps()[0].healing
    assert store.restore(7, case.state(1)).healing is None


@over(*ALL)
def test_another_state_does_not_fit(case, store):
    store.save(7, case.state(1))
    store.wait()
    like = case.state(1)
    del like["weights"]["int64" if "int64" in like["weights"] else "int32"]
    like["weights"]["float32"] = like["weights"]["float32"][:3]
    like["weights"]["new"] = like["weights"]["half"]
    with pytest.raises(StateMismatch) as error:
        store.restore(7, like)
    differences = "; ".join(error.value.differences)
    assert all(each in differences for each in ("float32", "new", "int"))
    with pytest.raises(StateMismatch, match="no such entry"):
        store.restore(7, {"no such entry": like["weights"]})


@over(*ALL)
def test_statuses(case, store):
    for step in (1, 2, 3):
        store.save(step, case.state(step))
    store.wait()
    assert {saved.status for saved in store.steps()} == {"candidate"}
    store.mark(1, "good")
    store.mark(3, "quarantined")
    assert [saved.status for saved in store.steps()] == ["good", "candidate", "quarantined"]
    store.mark(3, "candidate")
    assert store.steps()[2].status == "candidate"
    with pytest.raises(StoreError, match="one of candidate, good, quarantined"):
        store.mark(1, "excellent")


@over(*ALL)
def test_the_last_known_good_one_stays(case, store):
    for step in (1, 2, 3):
        store.save(step, case.state(step))
    store.wait()
    store.mark(1, "good")
    with pytest.raises(LastGoodKept, match="step 1 is the last known-good"):
        store.delete(1)
    assert [saved.step for saved in store.steps()] == [1, 2, 3]
    store.mark(2, "good")
    store.delete(1)
    store.delete(3)
    assert [saved.step for saved in store.steps()] == [2]
    assert same_states(case.state(2), store.restore(2, case.state(2)).state)


@over(*ALL)
def test_a_nonfinite_state_is_never_known_good(case, store):
    store.save(7, case.with_nan())
    store.wait()
    (saved,) = store.steps()
    assert not saved.finite
    assert saved.nonfinite == ("weights.bfloat16",)
    with pytest.raises(NotFinite, match=r"weights\.bfloat16"):
        store.mark(7, "good")
    assert store.steps()[0].status == "candidate"


@over(*ALL)
def test_nonfinite_arrays_that_are_allowed(case, tmp_path):
    store = case.make(tmp_path, nonfinite_ok=["weights.b*16"])
    store.save(7, case.with_nan())
    store.wait()
    assert store.steps()[0].finite
    store.mark(7, "good")


@over(*ALL)
def test_a_step_that_is_not_there(case, store):
    store.save(7, case.state(1))
    store.wait()
    for call in (
        lambda: store.verify(8),
        lambda: store.restore(8, case.state(1)),
        lambda: store.mark(8, "good"),
        lambda: store.delete(8),
    ):
        with pytest.raises(CheckpointNotFound, match=r"step 8; it has: 7"):
            call()


@over(*ALL)
def test_a_fault_while_the_copy_is_taken_loses_nothing(case, store):
    store.save(7, case.state(1))
    store.wait()

    class Broken:
        def state_dict(self):
            raise MemoryError("no more of it")

    for step in range(8, 12):
        with pytest.raises(StoreError, match="no more of it"):
            store.save(step, {**case.state(2), "broken": Broken()})
    store.wait()
    assert [saved.step for saved in store.steps()] == [7]
    store.verify(7)
    assert same_states(case.state(1), store.restore(7, case.state(1)).state)


@over(*ALL)
@pytest.mark.parametrize("step", [-1, 1.0, "7", None, True])
def test_steps_are_whole_numbers(case, store, step):
    with pytest.raises(StoreError, match="whole number >= 0"):
        store.save(step, case.state(1))


@over(*ALL)
def test_a_healing_state_that_is_no_json(case, store):
    for healing in ({"x": object()}, {"x": float("nan")}):
        with pytest.raises(StoreError, match="JSON-safe"):
            store.save(7, case.state(1), healing=healing)
    assert store.steps() == []


@over(*ALL)
@pytest.mark.parametrize("state", [{}, None, [1]])
def test_nothing_to_save(case, store, state):
    with pytest.raises(StoreError, match="non-empty mapping of names to values"):
        store.save(7, state)
