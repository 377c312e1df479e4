"""A start that finds damaged checkpoints: an older one or an error, and never a silent step 0."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from healcore.runtime.store import NoGoodCheckpoint
from healcore.torch.store import DCPStore
from tests.healer import killed_runs
from tests.healer.run_directory import events
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.runtime.store.disk_faults import flip


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run that was killed at step 22, with checkpoints up to step 20."""
    folder = tmp_path_factory.mktemp("killed")
    killed_runs.killed(killed_runs.at_step, folder, 22)
    return folder


def largest(folder: Path) -> Path:
    return max((folder / "data").rglob("*"), key=lambda path: path.stat().st_size * path.is_file())


def flip_manifest(folder: Path) -> None:
    flip(folder / "manifest.json", 400)


def shorten_data(folder: Path) -> None:
    largest(folder).write_bytes(largest(folder).read_bytes()[:-1])


def flip_data(folder: Path) -> None:
    flip(largest(folder), 4 * largest(folder).stat().st_size)


def remove_state(folder: Path) -> None:
    (folder / "state.json").unlink()


def remove_all(folder: Path) -> None:
    for path in list(folder.iterdir()):
        shutil.rmtree(path) if path.is_dir() else path.unlink()


WAYS = [flip_manifest, shorten_data, flip_data, remove_state, remove_all]


def copy_of(killed: Path, folder: Path) -> list[Path]:
    """The checkpoints of a copy, oldest first."""
    shutil.copytree(killed, folder, dirs_exist_ok=True)
    return sorted(folder.glob("step-*"))


@pytest.mark.parametrize("damage", WAYS)
def test_every_checkpoint_damaged_is_refused(damage, killed, tmp_path):
    for each in copy_of(killed, tmp_path):
        damage(each)
    loop = loop_of("torch")
    before = sorted(path.name for path in tmp_path.glob("step-*"))
    with pytest.raises(NoGoodCheckpoint, match="damaged"):
        train(loop, rules(), range(40), store=tmp_path)
    assert "end" in [event["kind"] for event in events(tmp_path)]
    assert loop.faults.order == []
    assert sorted(path.name for path in tmp_path.glob("step-*")) == before, "nothing is deleted"


@pytest.mark.parametrize("damage", WAYS)
def test_damaged_checkpoints_are_named_and_the_newest_intact_one_is_used(
    damage, killed, tmp_path, caplog
):
    *_, second, newest = copy_of(killed, tmp_path)
    damage(second)
    damage(newest)
    loop = loop_of("torch")
    with caplog.at_level(logging.INFO, "healcore"):
        facts = train(loop, rules(), range(40), store=tmp_path)
    assert facts["step"] == 40
    assert loop.faults.order[0] == 10
    logged = [event["step"] for event in events(tmp_path, "damaged")]
    assert sorted(logged) == [15, 20]
    (line,) = [r.getMessage() for r in caplog.records if "cannot be used" in r.getMessage()]
    assert "resumes at step 10: 10 steps up to checkpoint 20 are lost" in line
    assert line.count("damaged") == 2


def test_a_rollback_names_what_it_passes_over(tmp_path):
    """Damage that came while the run was under way: the listing alone would not show it."""

    def damage(healer: Any, number: int) -> None:
        if number == 23:
            healer._loop.saver.store.wait()
            (folder,) = tmp_path.glob("step-0000000015.*")
            remove_state(folder)

    store: Any = DCPStore(tmp_path)
    loop = loop_of("torch", Faults(always=[23]))
    train(loop, rules(), range(40), store=store, before=damage)
    (logged,) = events(tmp_path, "rollback")
    assert logged["checkpoint"] == 10
    assert [event["step"] for event in events(tmp_path, "damaged")] == [15]
