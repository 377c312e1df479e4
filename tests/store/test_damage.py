"""Bits that flip, files that go: it is noticed, and an older checkpoint is used."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from healcore.runtime.store import (
    CheckpointDamaged,
    NoGoodCheckpoint,
    checksummed_json,
    restore_first_intact,
)
from healcore.runtime.store.checksummed_json import ChecksumError
from tests.store.worlds import DISKS, World, over, same_states

FLIPS = 60


def two_saves(world: World, root: Path) -> Path:
    """Known-good checkpoints of steps 1 and 2; returns the newer one's directory."""
    store = world.make(root)
    for step in (1, 2):
        store.save(step, world.state(step), healing={"step": step})
        store.wait()
        store.mark(step, "good")
    return Path(store.steps()[1].path)


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


@over(*DISKS)
def test_60_of_60_flipped_bits_are_noticed_and_the_older_one_is_used(world, tmp_path):
    newer = two_saves(world, tmp_path)
    targets = [path for path in files(newer) if path.name != "status.json"]
    sizes = [path.stat().st_size for path in targets]
    rng = random.Random(20261120)
    like, noticed = world.state(3), 0
    for _ in range(FLIPS):
        (path,) = rng.choices(targets, sizes)
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        store = world.make(tmp_path)  # what the next start sees
        with pytest.raises(CheckpointDamaged) as error:
            store.verify(2)
        assert error.value.file == path.relative_to(newer).as_posix()
        landed = restore_first_intact(store, [2, 1], like)
        noticed += len(landed.damaged)
        assert landed.step == 1
        assert landed.restored.healing == {"step": 1}
        assert same_states(world.state(1), landed.restored.state)
        flip(path, bit)
        if newer.name in {Path(saved.path or "").name for saved in store.steps()}:
            store.mark(2, "good")  # it was quarantined, rightly
    assert noticed == FLIPS
    assert same_states(world.state(2), world.make(tmp_path).restore(2, like).state)


@over(*DISKS)
def test_every_bit_of_the_manifest(world, tmp_path):
    newer = two_saves(world, tmp_path)
    manifest = newer / "manifest.json"
    data = manifest.read_bytes()
    for bit in range(len(data) * 8):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ChecksumError):
            checksummed_json.loads(bytes(spoilt))
    flip(manifest, 8 * (len(data) // 2))
    store = world.make(tmp_path)
    assert [saved.step for saved in store.steps()] == [1]
    assert any(newer.name in told and "manifest.json" in told for told in store.problems())


@over(*DISKS)
def test_a_damaged_status_says_nothing(world, tmp_path):
    newer = two_saves(world, tmp_path)
    flip(newer / "status.json", 100)
    store = world.make(tmp_path)
    assert [saved.status for saved in store.steps()] == ["good", "candidate"]
    assert any("damaged status.json" in told for told in store.problems())
    store.mark(2, "good")
    assert store.problems() == []


@over(*DISKS)
@pytest.mark.parametrize("how", ["missing", "truncated", "longer", "a directory"])
def test_a_file_that_is_not_whole(world, tmp_path, how):
    newer = two_saves(world, tmp_path)
    for path in files(newer):
        if path.name == "status.json":
            continue
        data = path.read_bytes()
        path.unlink()
        if how == "truncated" and data:
            path.write_bytes(data[:-1])
        elif how == "longer":
            path.write_bytes(data + b"\0")
        elif how == "a directory":
            path.mkdir()
        store = world.make(tmp_path)
        assert [saved.step for saved in store.steps()] == [1], path
        assert any(newer.name in told for told in store.problems())
        with pytest.raises(CheckpointDamaged, match=path.name):
            store.restore(2, world.state(2))
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
    assert [saved.step for saved in world.make(tmp_path).steps()] == [1, 2]


@over(*DISKS)
def test_nothing_intact_is_left(world, tmp_path):
    newer = two_saves(world, tmp_path)
    for folder in tmp_path.iterdir():
        flip(folder / "state.json", 9)
    store, told = world.make(tmp_path), []
    with pytest.raises(NoGoodCheckpoint, match=r"step 2 is damaged.*step 1 is damaged"):
        restore_first_intact(store, [2, 1], world.state(1), told.append)
    assert [error.step for error in told] == [2, 1]
    assert {saved.status for saved in store.steps()} == {"quarantined"}
    assert newer.exists()  # kept for a person to look at


@over(*DISKS)
def test_what_is_not_known_is_told_and_stays(world, tmp_path):
    newer = two_saves(world, tmp_path)
    (newer / "data" / "notes.txt").write_text("mine")
    (tmp_path / "README").write_text("mine too")
    (tmp_path / "step-7").mkdir()
    store = world.make(tmp_path)
    told = "\n".join(store.problems())
    assert all(each in told for each in ("data/notes.txt", "README", "step-7"))
    assert same_states(world.state(2), store.restore(2, world.state(1)).state)
    store.save(3, world.state(3))
    store.wait()
    assert (newer / "data" / "notes.txt").read_text() == "mine"
    assert (tmp_path / "README").read_text() == "mine too"


@over(*DISKS)
def test_the_healer_s_own_file_is_no_stranger(world, tmp_path):
    store = world.make(tmp_path)
    (tmp_path / "healcore.json").write_text("{}")
    assert store.problems() == []
    (tmp_path / "healcorejson").write_text("{}")
    assert store.problems() == ["healcorejson was not written by healcore"]


@over(*DISKS)
def test_a_directory_that_was_renamed(world, tmp_path):
    """The step in the name is not believed against the manifest."""
    newer = two_saves(world, tmp_path)
    newer.rename(tmp_path / newer.name.replace("0002.", "0009."))
    store = world.make(tmp_path)
    assert [saved.step for saved in store.steps()] == [1]
    assert any("is of step 2" in told for told in store.problems())


@over(*DISKS)
def test_a_copied_store_is_the_same_store(world, tmp_path):
    two_saves(world, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    store = world.make(tmp_path / "b")
    assert [saved.status for saved in store.steps()] == ["good", "good"]
    store.verify(2)


@pytest.mark.parametrize(
    "text", ['{"arrays":NaN,"digest":"0"}', '{"digest":"0","a":Infinity}', "[]"]
)
def test_what_json_cannot_hold_is_damage_and_no_crash(text):
    """One such manifest must not take the others with it."""
    with pytest.raises(ChecksumError, match="is not what was written"):
        checksummed_json.loads(text.encode())
