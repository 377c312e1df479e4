"""The same tests over every store, values of checkpoints, and which can be deleted."""

import itertools
import json
import math
import shutil
import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import (
    AttemptHistory,
    CheckpointInfo,
    CheckpointNotFound,
    Keep,
    StateMismatch,
    StoreError,
    UnsavableState,
    disallowed,
    superfluous,
)
from tests.runtime.store.disk_faults import read_only
from tests.runtime.store.store_cases import (
    ALL,
    TIERS,
    Cursor,
    StoreCase,
    forget,
    over,
    same,
    same_states,
)

HEALING = {"schema": 1, "state": {"heal_step": 120}, "lr": 0.5}


@over(*ALL)
def test_a_save_is_exact_and_shares_no_memory_with_the_live_or_a_restored_state(case, tmp_path):
    store = case.make(tmp_path / "checkpoints")
    assert store.checkpoints() == store.damaged() == []
    record = json.loads(json.dumps(HEALING))
    state = case.state(1)
    store.save(7, state, record=record)
    case.spoil(state)
    record["state"]["heal_step"] = -1
    store.wait()
    for _ in range(2):
        restored = store.restore(7, case.state(2))
        assert same_states(case.state(1), restored.state)
        assert restored.record == HEALING
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
    assert store.records() == {}
    for same_but_needed in (Cursor(), {"optional": True}):
        with pytest.raises(StateMismatch, match='"healcore" is missing in the saved state'):
            store.restore(7, {**like, "healcore": same_but_needed})


@over(*ALL)
def test_nan_and_inf_in_a_record_cost_no_checkpoint_and_come_back(case, tmp_path):
    record = {"attempts": [0], "level": math.nan, "deep": [{"at": math.inf}, [-math.inf, 0.1]]}
    store = case.filled(tmp_path, 7, record=record)
    assert same(store.restore(7, case.state(1)).record, record)
    assert same(store.records(), {7: record})
    store.replace_record(7, {"level": math.nan})
    store.verify(7)
    if store.durable:
        forget(store)
    assert same(store.records(), {7: {"level": math.nan}})


@over(*ALL)
def test_a_commit_replaces_the_record_alone_and_what_fails_changes_nothing(case, tmp_path):
    store = case.filled(tmp_path, 7, record=HEALING)
    like = case.state(1)
    store.replace_record(7, {"lr": 0.25})
    assert store.nonfinite_in(case.state(0)) == ()
    assert store.nonfinite_in(case.with_nan()) == ("weights.bfloat16",)
    del like["weights"]["int32" if case.in_jax else "int64"]
    like["weights"]["float32"] = like["weights"]["float32"][:3]
    like["weights"]["new"] = like["weights"]["half"]
    with pytest.raises(StateMismatch) as error:
        store.restore(7, like)
    found = [each in "; ".join(error.value.differences) for each in ("float32", "new", "int")]
    assert found == [True, case.in_jax, case.in_jax]  # in torch names may come and go
    with pytest.raises(StateMismatch, match="no such entry"):
        store.restore(7, {"no such entry": like["weights"]})
    with pytest.raises(CheckpointNotFound):
        store.replace_record(8, {})
    with pytest.raises(StoreError, match="JSON-safe"):
        store.replace_record(7, {"lr": object()})

    class Broken:
        def state_dict(self):
            raise MemoryError("no more of it")

    for step in range(8, 12):
        with pytest.raises(StoreError, match="no more of it"):
            store.save(step, {**case.state(2), "broken": Broken()})
    store.wait()
    assert [saved.step for saved in store.checkpoints()] == [7]
    restored = store.restore(7, case.state(2))
    assert store.records()[7] == restored.record == {"lr": 0.25}
    assert same_states(case.state(7), restored.state)


def test_arrays_that_may_hold_nan_are_named_by_patterns():
    assert disallowed(["model.a.mask", "model.masks"], ["model.*.mask"]) == ("model.masks",)


# -- after a rollback the same steps are saved again ----------------------------------------------


def save(case: StoreCase, store, step: int, seed: int, *attempts: int) -> None:
    record = {"seed": seed, "attempts": [0, *attempts], "known_good_up_to": 1}
    store.save(step, case.state(seed), record=record)
    store.wait()


def holds(case: StoreCase, store, step: int, seed: int) -> bool:
    """Whether the save that counts for a step is the one of that seed."""
    restored = store.restore(step, case.state(0))
    return restored.record["seed"] == seed and same_states(case.state(seed), restored.state)


def statuses(store) -> list[tuple[int, str]]:
    return [(saved.step, saved.status) for saved in store.checkpoints()]


def roll_back(store, target: int, *attempts: int) -> None:
    """The Healer's commit of a rollback."""
    store.replace_record(target, {**store.records()[target], "attempts": [0, *attempts]})


@over(*ALL)
def test_steps_are_saved_again_after_a_rollback(case, tmp_path):
    store = case.make(tmp_path)
    for step in (1, 2, 3):
        save(case, store, step, step)
    roll_back(store, 1, 1)
    if store.durable:  # memory deletes them at once
        assert statuses(store) == [(1, "good"), (2, "abandoned"), (3, "abandoned")]
    save(case, store, 2, 12, 1)
    assert holds(case, store, 2, 12)
    for seed in (13, 14):
        save(case, store, 3, seed, 1)
        assert holds(case, store, 3, seed)
    assert statuses(store) == [(1, "good"), (2, "candidate"), (3, "candidate")]
    assert store.damaged() == []
    if store.durable:
        names = sorted(path.name for path in store.root.iterdir())
        assert names == [f"step-000000000{each}" for each in ("1.1", "2.2", "3.2")]


@over(*TIERS)
def test_the_tenth_attempt_is_newer_than_the_ninth(case, tmp_path):
    """As after a kill between a save and the deletion of the older one."""
    store = case.make(tmp_path / "run")
    older = tmp_path / "older"
    save(case, store, 3, 9, *[1] * 8)
    shutil.copytree(store.root, older)
    save(case, store, 3, 10, *[1] * 9)
    shutil.copytree(older, store.root, dirs_exist_ok=True)
    reopened = case.make(store.root)
    assert reopened.records()[3]["seed"] == 10
    assert [saved.attempt for saved in reopened.checkpoints()] == [10]
    assert reopened.restore(3, case.state(0)).record["seed"] == 10


@over(*TIERS)
def test_an_older_save_on_disk_is_another_one(case, tmp_path):
    """As after a failed write to disk: memory and disk have different saves of one step."""
    store = case.make(tmp_path)
    save(case, store, 1, 1)
    save(case, store, 3, 3)
    roll_back(store, 1, 1)
    with read_only(store.root):
        store.save(
            3, case.state(13), record={"seed": 13, "attempts": [0, 1], "known_good_up_to": 1}
        )
        store.join()
    assert [failure.step for failure in store.take_failures()] == [3]
    assert statuses(store) == [(1, "good"), (3, "candidate")]
    assert holds(case, store, 3, 13)
    store.delete(3)
    assert statuses(store) == [(1, "good")]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.data())
def test_what_was_saved_after_the_step_of_a_later_rollback_is_abandoned(bases, data):
    """Against a run that plays the attempts: which saves lead from the start to the end?"""
    attempts = [0]
    saved = set()
    alive = set()
    for base in bases:
        last = data.draw(st.integers(attempts[-1], 12))
        new = {(step, len(attempts)) for step in range(attempts[-1], last + 1)}
        attempts.append(min(base, last))
        saved |= new
        alive = {(step, attempt) for step, attempt in alive | new if step <= attempts[-1]}
    history = AttemptHistory(tuple(attempts))
    assert alive == {each for each in saved if not history.abandons(*each)}


# -- which checkpoints can be deleted -------------------------------------------------------------

CODES = {"g": "good", "c": "candidate", "a": "abandoned", "n": "candidate"}


def saves(text: str) -> list[CheckpointInfo]:
    """Of "gcan": a known-good one of step 0, a candidate of step 10, …; n: one with NaN in it."""
    return [
        CheckpointInfo(10 * i, CODES[code], 1, 0.0, 1, None, ("w",) * (code == "n"))  # type: ignore[arg-type]
        for i, code in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("text", "keep", "dropped"),
    [
        pytest.param("", Keep(), [], id="no checkpoint"),
        pytest.param("ggggg", Keep(good=3), [0, 10], id="three good ones stay"),
        pytest.param("gc", Keep(good=1), [], id="the only good one stays"),
        pytest.param("gaana", Keep(good=1), [10, 20, 40], id="abandoned ones go"),
        pytest.param(
            "cccc", Keep(candidates=2), [10, 20], id="the oldest candidate is the next good one"
        ),
        pytest.param(
            "gcccc", Keep(good=1, candidates=2), [20, 30], id="candidates after a good one"
        ),
        pytest.param("nncccc", Keep(candidates=2), [30, 40], id="candidates with NaN go first"),
        pytest.param("nnnn", Keep(), [0, 10], id="only NaN: two stay"),
    ],
)
def test_which_checkpoints_are_superfluous(text, keep, dropped):
    assert superfluous(saves(text), keep) == dropped
    assert superfluous(list(reversed(saves(text))), keep) == dropped


@pytest.mark.parametrize("every", [1, 730])
def test_older_ones_stay_at_distances_that_grow_geometrically(every):
    """Of a run that saves regularly and whose checkpoints all become good."""
    keep = Keep(good=3, older=True)
    kept: list[CheckpointInfo] = []
    for step in range(0, 3000 * every, every):
        kept.append(CheckpointInfo(step, "good", 1, 0.0, 1, None))
        gone = superfluous(kept, keep)
        kept = [save for save in kept if save.step not in gone]
        assert superfluous(kept, keep) == []
    left = [save.step for save in kept]
    newest = left[-1]
    assert left[-3:] == [newest - 2 * every, newest - every, newest]
    assert left[0] == 0, "the run's first is the way out of any drift"
    distances = [newest - step for step in left[-2::-1]]
    assert all(b <= 4 * a for a, b in itertools.pairwise(distances))
    assert len(left) <= 3 + math.log2(newest / every) + 1


# -- nested Python values as JSON and back --------------------------------------------------------

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(-9, 9))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda parts: deque(parts, maxlen=5)),
    ),
    max_leaves=8,
)


class Pair(NamedTuple):
    left: Any
    right: Any


def unknown(path: Any, value: Any) -> None:
    return None


def back(value: Any) -> Any:
    node = json.loads(json.dumps(values.encode(value, (), unknown)))
    return values.decode(node, unknown)


@given(VALUES)
def test_any_value_comes_back(value):
    assert same(value, back(value))
    assert repr(value) == repr(back(value)), "in the same order"


@pytest.mark.parametrize(
    "value",
    [
        pytest.param({1, "a"}, id="set"),
        pytest.param(frozenset({(1, 2)}), id="frozenset"),
        pytest.param(deque(), id="deque"),
        pytest.param(set(), id="empty set"),
        pytest.param(OrderedDict([("b", 1), ("a", OrderedDict())]), id="OrderedDict"),
        pytest.param(Counter("abca"), id="Counter"),
    ],
)
def test_other_types_of_the_standard_library_are_saved_exactly(value):
    assert same(value, back(value))


OwnDict = type("OwnDict", (dict,), {})
OwnCounter = type("Counter", (Counter,), {})  # its name is the standard library's
Text = type("Text", (str,), {})


@pytest.mark.parametrize(
    "value",
    [
        OwnDict(a=1), OwnCounter("ab"), time.localtime(0), Pair(1, 2),
        defaultdict(int), {"key": {Text("a"): 1}}, {Pair(1, 2): 1}.keys(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_type_that_would_be_lost_is_refused_with_its_place(value: Any):
    with pytest.raises(UnsavableState, match=r"state\['x'\]\['y'\]"):
        values.encode({"x": {"y": value}}, (), unknown)
