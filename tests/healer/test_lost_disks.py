"""A disk that is gone, full or read-only when a run has to go back: memory has what it needs."""

from __future__ import annotations

import re
import shutil
from contextlib import ExitStack, nullcontext, suppress
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


def run(framework: str, folder: Path, before: Any = None, *, lost: bool = False) -> Any:
    """Forty batches, one of them bad; the events are kept somewhere else.

    `before` is called before each step. With `lost` the disk is gone at the end too, so that the
    run cannot end with status 0. Returns the loop, the last event, and kind -> events.
    """
    loop, log = loop_of(framework, Faults(always=[BAD]), rules()), folder.with_suffix(".jsonl")
    with pytest.raises(LastStateNotSaved) if lost else nullcontext():
        train(loop, rules(), range(40), store=folder, events=log, before=before)
    found: dict[str, list[Any]] = {}
    for event in events_of(log):
        found.setdefault(event["kind"], []).append(event)
    (rollback,) = found["rollback"]
    (end,) = found["end"]
    assert (rollback["checkpoint"], end["step"]) == (15, 39)
    return loop, end, found


def said(found: Any, pattern: str, kind: str = "problem") -> bool:
    return any(re.search(pattern, event["problem"]) for event in found[kind])


def once(action: Any) -> Any:
    """A `before` that acts at the step before the bad one, when the checkpoints are on disk."""
    done: list[int] = []

    def before(healer: Any, number: int) -> None:
        if number == 22 and not done:
            done.append(number)
            healer._loop.saver.store.wait()
            action()

    return before


@BOTH
def test_a_directory_that_was_deleted(framework, tmp_path):
    healthy, _, _ = run(framework, tmp_path / "healthy")
    folder = tmp_path / "deleted"
    loop, _, found = run(framework, folder, once(lambda: shutil.rmtree(folder)), lost=True)
    assert same(loop.weights(), healthy.weights())
    assert said(found, "cannot be read.* in memory")
    assert said(found, "rollback is not on disk")
    assert "No such file" in found["save_failed"][-1]["problem"]


@BOTH
def test_a_disk_that_comes_back_has_nothing_of_the_branch_that_was_left(framework, tmp_path):
    """Unmounted at the rollback. Its checkpoints are of a branch that the run has left."""
    folder, away = tmp_path / "disk", tmp_path / "away"
    seen: dict[int, str] = {}
    unmount = once(lambda: folder.rename(away))

    def before(healer: Any, number: int) -> None:
        unmount(healer, number)
        if healer.rollbacks and healer.step == 22 and away.exists():
            store = healer._loop.saver.store
            with pytest.raises(StoreError):
                store.steps_on_disk()
            away.rename(folder)
            seen.update({saved.step: saved.status for saved in store.steps_on_disk()})

    _, end, _ = run(framework, folder, before)
    assert seen[20] == "candidate", "it cannot know"
    assert end["last_good"] == 35
    # The next run in this directory knows what the rollback has cost.
    records = [each.read_text() for each in folder.glob("step-*/healing.json")]
    assert '"rollbacks":[{' in max(records, key=len)


@BOTH
def test_a_directory_that_became_read_only(framework, tmp_path):
    folder, fixed = tmp_path / "fixed", ExitStack()
    folder.mkdir()
    fix = once(lambda: fixed.enter_context(read_only(folder)))

    def before(healer: Any, number: int) -> None:
        fix(healer, number)
        if healer.rollbacks and healer.step == 27:
            fixed.close()

    with fixed:
        _, end, found = run(framework, folder, before)
    assert said(found, "rollback is not on disk")
    assert end["last_good"] == 35


@BOTH
def test_a_disk_that_is_full_at_the_rollback(framework, tmp_path):
    with small_disk(tmp_path / "disk", megabytes=4) as disk:

        def fill() -> None:
            with (disk / "other").open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(1 << 16))

        _, _, found = run(framework, disk, once(fill), lost=True)
    assert said(found, "No space left", "save_failed")
