"""The same tests over every store."""

from __future__ import annotations

import json

import pytest

from healcore.runtime.store import CheckpointNotFound, StateMismatch, StoreError
from tests.runtime.store.store_cases import ALL, DISKS, TIERS, Cursor, over, same_states

HEALING = {"schema": 1, "state": {"heal_step": 120}, "lr": 0.5}


@over(*ALL)
def test_a_save_is_exact_and_shares_no_memory_with_the_live_or_a_restored_state(case, tmp_path):
    store = case.make(tmp_path / "checkpoints")
    assert store.steps() == store.damaged() == []
    healing, state = json.loads(json.dumps(HEALING)), case.state(1)
    store.save(7, state, healing=healing)
    case.spoil(state)
    healing["state"]["heal_step"] = -1
    store.wait()
    for _ in range(2):
        restored = store.restore(7, case.state(2))
        assert same_states(case.state(1), restored.state)
        assert restored.healing == HEALING
        cursor = Cursor()
        cursor.load_state_dict(restored.state["cursor"])
        case.spoil({**restored.state, "cursor": cursor})
        store.verify(7)


class Newcomer(Cursor):
    """Stands for an entry that a Healer adds and that older or foreign checkpoints lack."""

    optional = True


@over(*ALL)
def test_optional_names_that_a_checkpoint_lacks_are_left_out(case, tmp_path):
    store = case.filled(tmp_path, 7)
    store.save(8, {**case.state(1), "healcore": Newcomer(5)})
    store.wait()
    like = {**case.state(2), "healcore": Newcomer()}
    assert same_states(case.state(7), store.restore(7, like).state)
    assert store.restore(8, like).state["healcore"]["at"] == 5
    assert store.restore(7, {"healcore": Newcomer()}) == ({}, None)
    assert store.healings() == {}
    for same_but_needed in (Cursor(), {"optional": True}):
        with pytest.raises(StateMismatch, match='"healcore" is missing in the saved state'):
            store.restore(7, {**like, "healcore": same_but_needed})


@over(*ALL)
def test_another_state_does_not_fit(case, tmp_path):
    store, like = case.filled(tmp_path, 7), case.state(1)
    del like["weights"]["int32" if case.in_jax else "int64"]
    like["weights"]["float32"] = like["weights"]["float32"][:3]
    like["weights"]["new"] = like["weights"]["half"]
    with pytest.raises(StateMismatch) as error:
        store.restore(7, like)
    differences = "; ".join(error.value.differences)
    assert all(each in differences for each in ("float32", "new", "int"))
    with pytest.raises(StateMismatch, match="no such entry"):
        store.restore(7, {"no such entry": like["weights"]})


@over(*ALL)
def test_a_commit_replaces_the_healing_state_alone(case, tmp_path):
    store = case.filled(tmp_path, 7, healing=HEALING)
    store.commit(7, {"lr": 0.25})
    restored = store.restore(7, case.state(2))
    assert store.healings()[7] == restored.healing == {"lr": 0.25}
    assert same_states(case.state(7), restored.state)
    with pytest.raises(CheckpointNotFound):
        store.commit(8, {})
    with pytest.raises(StoreError, match="JSON-safe"):
        store.commit(7, {"lr": float("nan")})


@over(*ALL)
def test_a_fault_while_the_copy_is_taken_loses_nothing(case, tmp_path):
    store = case.filled(tmp_path, 7)

    class Broken:
        def state_dict(self):
            raise MemoryError("no more of it")

    for step in range(8, 12):
        with pytest.raises(StoreError, match="no more of it"):
            store.save(step, {**case.state(2), "broken": Broken()})
    store.wait()
    assert [saved.step for saved in store.steps()] == [7]
    store.verify(7)
    assert same_states(case.state(7), store.restore(7, case.state(1)).state)


@over(*DISKS, *TIERS)  # memory keeps no such copy
def test_arrays_that_may_hold_nan_can_be_named_later(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, case.with_nan(), healing={"attempts": [0], "proven": 9})
    store.wait()
    (saved,) = store.steps()
    assert (saved.status, saved.finite) == ("candidate", False)
    assert saved.nonfinite == ("weights.bfloat16",)
    store.nonfinite_ok += ("weights.b*16",)
    (saved,) = store.steps()
    assert (saved.status, saved.finite, saved.nonfinite) == ("good", True, ())
    store.verify(1)
    store.nonfinite_ok = ()
    assert not store.steps()[0].finite


@over(*ALL)
def test_nonfinite_entries_are_found_without_a_save(case, tmp_path):
    store = case.make(tmp_path)
    assert store.nonfinite_in(case.state(0)) == ()
    assert store.nonfinite_in(case.with_nan()) == ("weights.bfloat16",)
    assert store.steps() == []
    store.nonfinite_ok += store.nonfinite_in(case.with_nan())
    store.save(1, case.with_nan())
    store.save(2, case.state(0))
    store.wait()
    assert all(saved.finite for saved in store.steps())
