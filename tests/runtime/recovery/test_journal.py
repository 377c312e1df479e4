"""The journal and the first snapshot belong to one run, through all of its processes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.recovery.journal import Journal, JournalError
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.store import NoGoodCheckpoint, StoreError, checksummed_json
from tests.healer.crashes import crash
from tests.healer.killed_runs import (
    after_rollback,
    is_poisoned,
    killed,
    never_known_good,
    poisoned,
    show_poison,
    with_nothing_on_disk,
)
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_a_checkpoint_whose_state_breaks_again_is_not_restored_twice(framework, tmp_path):
    killed(poisoned, framework, tmp_path)
    policy = never_known_good()
    loop = loop_of(framework, policy=policy)

    def look(healer: Any, number: int) -> None:
        loop.state = healer.state
        show_poison(loop, number)

    facts = train(loop, policy, range(30), store=tmp_path, before=look)
    assert not is_poisoned(loop)
    assert [event["checkpoint"] for event in events(tmp_path, "rollback")] == [10, 0]
    assert facts["rollbacks"] == 2


# -- a stale journal ----------------------------------------------------------------------------


def first_look(folder: Path, **options: Any) -> tuple[Any, dict[str, Any]]:
    seen: dict[str, Any] = {}

    def look(healer: Any, number: int) -> None:
        engine = healer.driver.healing()["optimizer"]["state"]
        seen.setdefault("at", healer.step)
        seen.setdefault("lr", engine["lr"]["scale"])
        seen.setdefault("left", engine["budget"]["recoveries"])
        seen.setdefault("rollbacks", healer.rollbacks)

    loop = loop_of("torch", Faults(always=[13]))
    train(loop, rules(), range(10), store=folder, before=look, **options)
    return loop, seen


def test_a_journal_without_its_checkpoints_is_no_new_run_s(tmp_path):
    killed(after_rollback, tmp_path, 13)
    for each in tmp_path.glob("step-*"):
        shutil.rmtree(each)
    with pytest.raises(NoGoodCheckpoint, match=r"healcore\.json.*delete the file"):
        first_look(tmp_path)


def test_a_journal_of_another_version_is_refused(tmp_path):
    path = tmp_path / "healcore.json"
    path.write_bytes(checksummed_json.dumps({"schema": 2, "begun": None}))
    with pytest.raises(JournalError, match=r"has schema 2, .* reads 4: .*resume without it: mv "):
        Journal(path).read()


# -- a kill before anything was on disk -----------------------------------------------------------


def test_a_rollback_of_a_run_without_a_checkpoint_is_not_in_the_way(tmp_path, caplog):
    killed(with_nothing_on_disk, tmp_path)
    assert Journal(tmp_path / "healcore.json").read().plan is not None
    with caplog.at_level("INFO", "healcore"):
        loop, seen = first_look(tmp_path)
    assert seen == {"at": 0, "lr": 1.0, "left": 3, "rollbacks": 0}
    assert any("healcore.json" in record.getMessage() for record in caplog.records)
    assert loop.faults.order[:4] == [0, 1, 2, 3]


def test_a_rollback_that_cannot_be_finished_names_the_file(tmp_path, monkeypatch):
    def go() -> None:
        train(loop_of("torch", Faults(always=[13])), rules(), range(40), store=tmp_path)

    crash(monkeypatch, Restorer, "_apply_plan", lambda *_, **__: True, go)
    for each in tmp_path.glob("step-*"):
        (each / "state.json").write_text("{}")
    with pytest.raises(StoreError, match=r"healcore\.json.*delete that file"):
        go()
    with pytest.raises(StoreError, match=r"healcore\.json"):
        go()
