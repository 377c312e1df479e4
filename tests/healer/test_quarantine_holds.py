"""A checkpoint stays quarantined even if its status file is damaged or lost."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from healcore.torch.store import DCPStore
from tests.healer import killed_runs
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.runtime.store.disk_faults import flip

BAD = [23]


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that went back from step 25 to 15, and was killed at its next step."""
    folder = tmp_path_factory.mktemp("killed")
    killed_runs.killed(killed_runs.after_rollback, folder, 23)
    quarantined = [s.step for s in DCPStore(folder).steps() if s.status == "quarantined"]
    assert quarantined == [20]
    return folder


def status_of(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"step-{step:010d}.*")
    return found / "status.json"


def go_on(folder: Path) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    def look(healer: Any, number: int) -> None:
        engine = healer.driver.healing()["optimizer"]["state"]
        seen.setdefault("at", healer.step)
        seen.setdefault("lr", engine["lr"]["scale"])
        seen.setdefault("left", engine["budget"]["recoveries"])

    train(loop_of("torch", Faults(always=BAD)), rules(), range(40), store=folder, before=look)
    return seen


@pytest.mark.parametrize("how", ["a flipped bit", "empty", "gone"])
def test_a_damaged_status_does_not_take_a_quarantine_back(how, killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    status = status_of(tmp_path, 20)
    if how == "a flipped bit":
        flip(status, 100)
    elif how == "empty":
        status.write_bytes(b"")
    else:
        status.unlink()
    assert go_on(tmp_path) == {"at": 15, "lr": 0.5, "left": 2}
    assert 20 in [event["checkpoint"] for event in events(tmp_path, "quarantine")[1:]]
