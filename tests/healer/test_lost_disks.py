"""A disk that is gone, full or read-only when a run has to go back: memory has what it needs."""

from __future__ import annotations

import shutil
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.loop.termination import LastStateNotSaved
from healcore.runtime.store.errors import StoreError
from tests.healer.run_directory import events_of
from tests.healer.training_loops import Faults, loop_of, rules, same, train
from tests.runtime.store.disk_faults import read_only, small_disk

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])
BAD = 23


def run(
    framework: str, folder: Path, before: Any = None, *, lost: bool = False
) -> tuple[Any, dict[str, Any], list[Any]]:
    """Forty batches, one of them bad; the events are kept somewhere else.

    Args:
        framework: "torch" or "jax".
        folder: for the checkpoints.
        before: called before each step.
        lost: the disk is gone at the end too, so that the run cannot end with status 0.
    """
    loop = loop_of(framework, Faults(always=[BAD]), rules())
    log = folder.with_suffix(".jsonl")
    facts: dict[str, Any] = {}
    with pytest.raises(LastStateNotSaved) if lost else nullcontext():
        facts = train(loop, rules(), range(40), store=folder, events=log, before=before)
    return loop, facts, events_of(log)


def logged(found: list[Any], kind: str) -> list[Any]:
    return [event for event in found if event["kind"] == kind]


@BOTH
def test_a_directory_that_was_deleted(framework, tmp_path, caplog):
    healthy, expected, _ = run(framework, tmp_path / "healthy")
    folder = tmp_path / "deleted"

    def delete(healer: Any, number: int) -> None:
        if number == 22 and not healer.rollbacks:
            healer._loop.saver.store.wait()
            folder.rename(tmp_path / "away")
            shutil.rmtree(tmp_path / "away")

    loop, _, found = run(framework, folder, delete, lost=True)
    assert len(logged(found, "rollback")) == 1
    assert found[-1]["step"] == expected["step"] == 39
    assert same(loop.weights(), healthy.weights())
    problems = [event["problem"] for event in logged(found, "problem")]
    assert any("cannot be read" in each and "in memory" in each for each in problems)
    assert any("rollback is not on disk" in each for each in problems)
    assert "No such file" in logged(found, "save_failed")[-1]["problem"]


@BOTH
def test_a_disk_that_comes_back_has_nothing_of_the_branch_that_was_left(framework, tmp_path):
    """Unmounted at the rollback. Its checkpoints are of a branch that the run has left."""
    folder, away = tmp_path / "disk", tmp_path / "away"
    seen: dict[str, Any] = {}

    def unmount(healer: Any, number: int) -> None:
        if number == 22 and not healer.rollbacks:
            healer._loop.saver.store.wait()
            folder.rename(away)
        if healer.rollbacks and healer.step == 22 and away.exists():
            seen["before"] = statuses(healer._loop.saver.store)
            away.rename(folder)
            seen["back"] = statuses(healer._loop.saver.store)

    def statuses(disk: Any) -> Any:
        try:
            disk.steps_on_disk()
        except StoreError:
            return "gone"
        return {saved.step: saved.status for saved in type(disk)(folder).steps()}

    _, facts, found = run(framework, folder, unmount)
    assert facts["step"] == 39
    target = logged(found, "rollback")[0]["checkpoint"]
    assert target == 15
    assert seen["before"] == "gone"
    assert seen["back"][20] == "candidate", "it cannot know"
    assert logged(found, "end")[0]["last_good"] == 35
    # The next run in this directory knows what the rollback has cost.
    records = [each.read_text() for each in folder.glob("step-*/healing.json")]
    assert '"rollbacks":[{' in max(records, key=len)


@BOTH
def test_a_directory_that_became_read_only(framework, tmp_path):
    folder = tmp_path / "fixed"
    folder.mkdir()
    holding: list[Any] = []

    def fix(healer: Any, number: int) -> None:
        if number == 22 and not holding:
            healer._loop.saver.store.wait()
            holding.append(read_only(folder))
            holding[0].__enter__()
        if healer.rollbacks and healer.step == 27 and len(holding) == 1:
            holding.append(holding[0].__exit__(None, None, None))

    try:
        _, facts, found = run(framework, folder, fix)
    finally:
        if len(holding) == 1:
            holding[0].__exit__(None, None, None)
    assert (facts["step"], facts["rollbacks"]) == (39, 1)
    assert logged(found, "rollback")[0]["checkpoint"] == 15
    assert any("rollback is not on disk" in e["problem"] for e in logged(found, "problem"))
    assert logged(found, "end")[0]["last_good"] == 35


@BOTH
def test_a_disk_that_is_full_at_the_rollback(framework, tmp_path):
    with small_disk(tmp_path / "disk", megabytes=4) as disk:

        def fill(healer: Any, number: int) -> None:
            if number == 22 and not healer.rollbacks:
                healer._loop.saver.store.wait()
                with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
                    while True:
                        file.write(bytes(1 << 16))

        _, _, found = run(framework, disk, fill, lost=True)
    assert len(logged(found, "rollback")) == 1
    assert any("No space left" in e["problem"] for e in logged(found, "save_failed"))
