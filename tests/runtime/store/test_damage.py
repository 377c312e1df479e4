"""Flipped bits and missing files are noticed, and an older checkpoint is used."""

import random
from pathlib import Path

import pytest

from healcore.runtime.store.checkpoints import CheckpointDamaged
from healcore.runtime.store.files import unseal
from healcore.runtime.store.manifest import MANIFEST
from tests.hostile.run_directories import part, rewrite
from tests.runtime.store.disk_faults import flip
from tests.runtime.store.store_cases import (
    DCP,
    DISKS,
    ORBAX,
    StoreCase,
    over,
    same_states,
)

HEALING = {"attempts": [0], "known_good_up_to": 2}


def two_saves(case: StoreCase, root: Path) -> Path:
    """Known-good checkpoints of steps 1 and 2; returns the newer one's directory."""
    return Path(case.filled(root, 1, 2, record=HEALING).checkpoints()[1].path)


def files_of(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow
@over(*DISKS)
def test_60_of_60_flipped_bits_are_noticed_and_the_older_one_is_intact(case, tmp_path):
    newer = two_saves(case, tmp_path)
    targets = files_of(newer)
    sizes = [path.stat().st_size for path in targets]
    rng = random.Random(20261120)
    like = case.state(3)
    for _ in range(60):
        (path,) = rng.choices(targets, sizes)
        bit = rng.randrange(path.stat().st_size * 8)
        flip(path, bit)
        store = case.make(tmp_path)  # what the next start sees
        for call in (store.verify, lambda step, store=store: store.restore(step, like)):
            with pytest.raises(CheckpointDamaged) as error:
                call(2)
            assert error.value.file == path.relative_to(newer).as_posix()
        found = store.restore(1, like)
        assert found.record == HEALING
        assert same_states(case.state(1), found.state)
        flip(path, bit)
    assert same_states(case.state(2), case.make(tmp_path).restore(2, like).state)


@pytest.mark.slow
@over(DCP, ORBAX)
def test_each_bit_of_the_manifest_is_checked(case, tmp_path):
    newer = two_saves(case, tmp_path)
    manifest = newer / "manifest.json"
    data = manifest.read_bytes()
    for bit in range(len(data) * 8):
        spoilt = bytearray(data)
        spoilt[bit // 8] ^= 1 << bit % 8
        with pytest.raises(ValueError, match="digest"):
            unseal(bytes(spoilt))
    flip(manifest, 8 * (len(data) // 2))
    store = case.make(tmp_path)
    assert [saved.step for saved in store.checkpoints()] == [1]
    assert [(Path(e.path).name, e.file) for e in store.damaged()] == [(newer.name, "manifest.json")]


@over(*DISKS)
@pytest.mark.parametrize("how", ["truncated", "longer", "a directory"])
def test_a_file_that_is_not_whole(case, tmp_path, how):
    newer = two_saves(case, tmp_path)
    for path in files_of(newer):
        data = path.read_bytes()
        path.unlink()
        if how == "truncated" and data:
            path.write_bytes(data[:-1])
        elif how == "longer":
            path.write_bytes(data + b"\0")
        elif how == "a directory":
            path.mkdir()
        store = case.make(tmp_path)
        with pytest.raises(CheckpointDamaged, match=path.name):
            store.restore(2, case.state(2))
        assert store.restore(1, case.state(2)).record == HEALING
        if path.is_dir():
            path.rmdir()
        path.write_bytes(data)
    assert [saved.step for saved in case.make(tmp_path).checkpoints()] == [1, 2]


def test_a_checkpoint_of_another_version_is_named(tmp_path):
    newer = two_saves(DCP, tmp_path)
    rewrite(newer, MANIFEST, part(newer, MANIFEST) | {"schema": 5})
    (error,) = DCP.make(tmp_path).damaged()
    assert "is of another version of healcore: resume with that version" in str(error)
