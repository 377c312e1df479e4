"""A list of stores: each checkpoint is in all directories, and a restart needs one intact copy."""

import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from healcore import Checkpoints, Healer, Keep
from healcore.errors import StoreError
from healcore.jax import OrbaxStore
from healcore.runtime.run.ending.exits import LastStateNotSaved
from healcore.runtime.store import manifest
from healcore.runtime.store.manifest import scan
from healcore.torch.store import DCPStore, MemoryStore
from tests.healer.run_directory import events, flip_a_bit, new_process, postmortems
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    Faults,
    breaks_off,
    loop_of,
    rules,
    same,
    train,
)
from tests.open_run import run_of
from tests.runtime.store.disk_faults import before_completion

STEPS = 30
"""Batches. With a NaN the run takes one step less, because the rollback skips the bad batch."""


def places(folder: Path) -> list[Path]:
    return [folder / "local", folder / "shared"]


def loop_with_nan(framework: str) -> Any:
    return loop_of(framework, Faults(once=[12]), rules())


def undisturbed(framework: str, folder: Path) -> list[Any]:
    loop = loop_with_nan(framework)
    train(loop, rules(), range(STEPS), store=folder / "undisturbed")
    return loop.weights()


def records(root: Path) -> dict[int, Any]:
    """The records of the checkpoints of a directory, by step."""
    return {step: first.manifest.record for step, (first, *_) in scan(root)[0].items()}


def folders(root: Path) -> dict[int, Path]:
    """The checkpoints of a directory, by step."""
    return {step: Path(first.folder or "") for step, (first, *_) in scan(root)[0].items()}


@BOTH_FRAMEWORKS
def test_each_directory_has_every_checkpoint_and_can_be_used_alone(framework, tmp_path):
    expected = undisturbed(framework, tmp_path)
    local, shared = places(tmp_path)
    loop = loop_with_nan(framework)
    assert train(loop, rules(), range(STEPS), store=[local, shared]).rollbacks == 1
    assert same(loop.weights(), expected)
    assert [*scan(local)[0]] == [*scan(shared)[0]] == [*scan(tmp_path / "undisturbed")[0]]
    assert records(local) == records(shared), "a rollback has changed the records in both"
    assert not events(local, "problem")
    assert not (shared / "healcore.events.jsonl").exists(), "the events are in the first"
    for alone in (shared, [shared], [str(local)]):
        new_process()
        again = loop_of(framework, policy=rules())
        assert train(again, rules(), range(STEPS), store=alone).step == STEPS - 1
        assert again.faults.order == [], "the run has completed"
        assert same(again.weights(), expected)


@BOTH_FRAMEWORKS
@pytest.mark.parametrize("lost", ["first", "second", "a bit of the first", "newest of the first"])
def test_a_killed_run_continues_from_the_newest_intact_checkpoint(framework, lost, tmp_path):
    local, shared = places(tmp_path)
    expected = undisturbed(framework, tmp_path)
    loop = loop_with_nan(framework)
    breaks_off(loop, rules(), range(STEPS), at=23, store=[local, shared])
    newest = folders(local)[20]
    if lost == "newest of the first":
        shutil.rmtree(newest)
    elif lost == "a bit of the first":
        flip_a_bit(newest, 1)
    else:
        shutil.rmtree(local if lost == "first" else shared)
    new_process()
    again = loop_of(framework, policy=rules())
    train(again, rules(), range(STEPS), store=[local, shared])
    assert again.faults.order[0] == 21, "after 20 steps and a skipped batch"
    assert same(again.weights(), expected)
    damaged = [each["step"] for each in events(local, "damaged")]
    assert damaged == ([20] if lost == "a bit of the first" else [])


def test_both_copies_of_a_checkpoint_are_damaged_so_the_next_older_one_is_restored(tmp_path):
    for root in places(tmp_path):
        root.mkdir()
    breaks_off(loop_of("torch"), rules(), range(STEPS), at=23, store=places(tmp_path))
    for root in places(tmp_path):
        flip_a_bit(folders(root)[20], 1)
    again = loop_of("torch")
    train(again, rules(), range(STEPS), store=places(tmp_path))
    assert again.faults.order[0] == 15


def test_a_checkpoint_stays_known_good_while_one_copy_is_intact(tmp_path):
    """Each copy in the first directory is damaged as soon as it is written."""
    local, shared = places(tmp_path)
    damaged: set[Path] = set()
    loop = loop_of("torch")
    options: Any = {"store": [local, shared], "checkpoints": Checkpoints(every=5)}
    with suppress(ZeroDivisionError), Healer(rules(), state=loop.state, **options) as healer:
        for number in healer.batches(range(60)):
            loop.step(healer, number)
            run_of(healer).store.wait()
            for folder in {*folders(local).values()} - damaged:
                flip_a_bit(folder, 1)
                damaged.add(folder)
            if number == 50:
                last_good = run_of(healer).saver.last_good_step
                raise ZeroDivisionError
    found = events(local, "damaged")
    assert found
    assert all(each["other_copy"] for each in found)
    assert last_good is not None
    assert last_good > 30
    (postmortem,) = postmortems(local)
    assert postmortem["last_good"] == last_good


class FailingDisk:
    """No checkpoint of a directory can be completed while the directory is full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.full: set[Path] = set()
        before_completion(monkeypatch, self._fail)

    def _fail(self, checkpoint: Path) -> None:
        if checkpoint.parent in self.full:
            raise OSError(28, "No space left on device")


@pytest.mark.parametrize("full", [0, 1])
@pytest.mark.parametrize(
    ("framework", "kind"),
    [("torch", DCPStore), pytest.param("jax", OrbaxStore, marks=pytest.mark.slow)],
)
def test_a_disk_that_is_full_costs_nothing_while_another_has_room(
    framework, kind, full, tmp_path, monkeypatch
):
    """The rollback after step 12 goes to checkpoint 5, which one directory lacks."""
    expected = undisturbed(framework, tmp_path)
    roots = places(tmp_path)
    disk = FailingDisk(monkeypatch)
    disk.full = {roots[full]}
    store = kind(roots)  # without copies in memory
    loop = loop_with_nan(framework)
    breaks_off(loop, rules(), range(STEPS), at=23, store=store)
    failed = events(roots[0], "save_failed")
    assert [each["step"] for each in failed] == [0, 5, 10, 10, 15, 20]
    assert f"{roots[1 - full]} has this checkpoint" in failed[0]["problem"]
    assert not scan(roots[full])[0]
    assert 20 in scan(roots[1 - full])[0]
    del store
    disk.full = set()
    new_process()
    again = loop_of(framework, policy=rules())
    train(again, rules(), range(STEPS), store=roots)
    assert same(again.weights(), expected)
    assert all(STEPS - 1 in scan(root)[0] for root in roots)


def test_the_last_state_is_lost_only_if_no_directory_has_it(tmp_path, monkeypatch):
    roots = places(tmp_path)
    disk = FailingDisk(monkeypatch)
    disk.full = {*roots}
    with pytest.raises(LastStateNotSaved):
        train(loop_of("torch"), rules(), range(12), store=roots)
    disk.full = {roots[0]}
    assert train(loop_of("torch"), rules(), range(12), store=roots).step == 12
    assert [*scan(roots[0])[0]] == []


@pytest.mark.parametrize("stuck", [False, True])
def test_old_checkpoints_are_deleted_in_each_directory(stuck, tmp_path, monkeypatch):
    """Also if one directory keeps what it has, because it has become read-only."""
    roots = places(tmp_path)
    remove = manifest.remove
    disk = FailingDisk(monkeypatch)

    def fails(folder: Path) -> None:
        if folder.parent in disk.full:
            raise OSError(30, "Read-only file system")
        remove(folder)

    def becomes_read_only(healer: Healer, number: int) -> None:
        if stuck and number == 20:
            disk.full = {roots[0]}

    options: dict[str, Any] = {"save_every": 2, "keep": Keep(good=1, candidates=2)}
    train(loop_of("torch"), rules(), range(40), store=tmp_path / "one", **options)
    monkeypatch.setattr(manifest, "remove", fails)
    train(loop_of("torch"), rules(), range(40), store=roots, before=becomes_read_only, **options)
    # How many are left depends on when the disk has written them: some of the 21 saves.
    few = range(2, 7)
    alone = [*scan(tmp_path / "one")[0]]
    first, second = ([*scan(root)[0]] for root in roots)
    assert len(alone) in few
    assert len(second) in few
    assert second[-1] == alone[-1] == 40
    assert len(first) in few
    assert first[-1] == 40 or (stuck and first[-1] <= 22)
    problems = [each["problem"] for each in events(roots[0], "problem")]
    assert any("cannot be deleted" in each for each in problems) is stuck


def test_a_directory_that_missed_a_rollback_does_not_undo_it(tmp_path, monkeypatch):
    """The record of the newest attempt counts, in whichever directory it is."""
    expected = undisturbed("torch", tmp_path)
    roots = places(tmp_path)
    before = tmp_path / "before"
    loop = loop_with_nan("torch")

    def keep(healer: Healer, number: int) -> None:
        if number == 12 and healer.rollbacks == 0:
            run_of(healer).saver.wait()
            shutil.copytree(roots[0], before)
        if number == 7 and healer.rollbacks:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop, rules(), range(STEPS), store=roots, before=keep)
    shutil.rmtree(roots[0])
    shutil.copytree(before, roots[0])
    new_process()
    again = loop_of("torch")
    result = train(again, rules(), range(STEPS), store=roots)
    assert result.rollbacks == 1
    assert same(again.weights(), expected)


def test_directories_of_two_runs_are_refused_by_name(tmp_path):
    for root in places(tmp_path):
        breaks_off(loop_of("torch"), rules(), range(STEPS), at=12, store=root)
        new_process()
    with pytest.raises(StoreError, match=r"(?s)of one run.*local has run .*shared has run ") as got:
        train(loop_of("torch"), rules(), range(STEPS), store=places(tmp_path))
    assert "empty directory" in str(got.value)
    # The directories are free again, and each run can go on.
    assert train(loop_of("torch"), rules(), range(STEPS), store=tmp_path / "local").step == STEPS


def test_what_is_no_list_of_directories_is_refused_in_words(tmp_path):
    state = loop_of("torch").state
    for wrong, message in [
        ([], r'store=\["/local/run", "/shared/run"\], not \[\]'),
        ([tmp_path, str(tmp_path)], "are different ones"),
        ([MemoryStore(), tmp_path], "a list of paths.*MemoryStore"),
        ([tmp_path, 3], r"not .*, 3\]"),
        ([tmp_path, ""], r"not .*, ''\]"),
    ]:
        with pytest.raises(ValueError, match=message):
            Healer(state=state, store=wrong)


def test_a_store_may_have_several_directories(tmp_path):
    roots = places(tmp_path)
    loop = loop_with_nan("torch")
    train(loop, rules(), range(STEPS), store=DCPStore(roots))
    assert same(loop.weights(), undisturbed("torch", tmp_path))
    assert scan(roots[0])[0].keys() == scan(roots[1])[0].keys()
