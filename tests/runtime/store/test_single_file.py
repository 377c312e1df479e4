"""Checkpoints of small states, which are one file that safetensors reads."""

import json
import os
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.torch import load_file as load_torch

from healcore.runtime.store import checksums, single_file
from healcore.runtime.store.checkpoints import CheckpointDamaged
from healcore.torch.store import DCPStore
from tests.runtime.store.store_cases import (
    DCP,
    JAX_FILE,
    ORBAX,
    SINGLE_FILES,
    TORCH_FILE,
    over,
    same,
    same_states,
)

LARGE = {TORCH_FILE: DCP, JAX_FILE: ORBAX}
"""The case that writes the same states in the files of the framework."""


def only_checkpoint(root: Path) -> Path:
    (folder,) = root.glob("step-*")
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@over(*SINGLE_FILES)
def test_a_save_of_a_small_state_is_one_file_and_one_rename(case, tmp_path, monkeypatch):
    calls: list[str] = []

    def counted(name: str) -> None:
        call: Any = getattr(os, name)

        def wrapper(*args: Any, **options: Any) -> Any:
            calls.append(name)
            return call(*args, **options)

        monkeypatch.setattr(os, name, wrapper)

    for name in ("rename", "replace", "mkdir", "fsync"):
        counted(name)
    store = case.make(tmp_path)
    state = case.state(3)
    calls.clear()
    store.save(3, state, record={"step": 3})
    store.wait()
    assert files_of(only_checkpoint(tmp_path)) == [single_file.FILE]
    # Its content, its name in the new directory, and the name of the directory.
    assert sorted(calls) == ["fsync", "fsync", "fsync", "mkdir", "rename"]
    assert store.restore(3, case.state(0)).record == {"step": 3}


@over(*SINGLE_FILES)
def test_both_forms_are_read_by_both_stores(case, tmp_path):
    """So a run goes on whose state grows, and a run of an earlier version."""
    large = LARGE[case]
    store, other = case.make(tmp_path), large.make(tmp_path)
    for step, each in ((1, store), (2, other)):
        each.save(step, case.state(step), record={"step": step})
        each.wait()
    names = [single_file.FILE in files_of(folder) for folder in sorted(tmp_path.glob("step-*"))]
    assert names == [True, False]
    for reader in (store, other, case.make(tmp_path)):
        assert [saved.step for saved in reader.checkpoints()] == [1, 2]
        for step in (1, 2):
            reader.verify(step)
            restored = reader.restore(step, case.state(0))
            assert same_states(case.state(step), restored.state)
            assert restored.record == {"step": step}
    store.replace_record(1, {"step": 7})
    assert [store.records()[step]["step"] for step in (1, 2)] == [7, 2]
    assert other.restore(1, case.state(0)).record == {"step": 7}


@over(*SINGLE_FILES)
def test_a_state_above_the_limit_is_in_files_of_the_framework(case, tmp_path):
    store = case.make(tmp_path)
    store.format.single_file_bytes = 10_000
    state = case.state(1)
    for step, large in ((1, np.zeros(9000, np.uint8)), (2, np.zeros(10_000, np.uint8)), (3, "x")):
        state["values"]["large"] = large if step < 3 else large * 10_000
        store.save(step, state)
        store.wait()
        (folder,) = tmp_path.glob(f"step-*{step}.1")
        assert (files_of(folder) == [single_file.FILE]) == (step == 1)
        assert same_states(state, store.restore(step, state).state)


def test_safetensors_reads_the_arrays_without_healcore(tmp_path):
    weights = {
        "kernel": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(4).bfloat16(),
        "transposed": torch.arange(6).reshape(2, 3).t(),
        "byte": torch.ones(3).to(torch.float8_e4m3fn),
        "complex": torch.tensor([1 + 2j], dtype=torch.complex128),
    }
    store = DCPStore(tmp_path)
    store.save(1, {"model": weights})
    store.wait()
    path = only_checkpoint(tmp_path) / single_file.FILE
    found = load_torch(path)
    for name, tensor in weights.items():
        if name != "complex":
            assert same(found[f"model.{name}"], tensor.contiguous()), name
    assert found["model.complex"].numpy().tobytes() == weights["complex"].numpy().tobytes()
    del weights["byte"], weights["half"]
    store.save(2, {"model": weights})
    store.wait()
    store.delete(1)
    found = load_numpy(only_checkpoint(tmp_path) / single_file.FILE)
    assert found["model.kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]


def test_arrays_are_aligned_when_the_file_is_mapped(tmp_path):
    store = DCPStore(tmp_path)
    state = {"x": [torch.ones(3, dtype=torch.uint8), torch.ones(3, dtype=torch.float64)]}
    store.save(1, state)
    store.wait()
    header = single_file.read_header(only_checkpoint(tmp_path) / single_file.FILE)
    for entry in header.table.values():
        size = {"U8": 1, "F64": 8}[entry["dtype"]]
        assert (header.start + entry["data_offsets"][0]) % size == 0


@pytest.mark.parametrize("name", ["__metadata__", "\ud800", "a\ud800"])
@over(*SINGLE_FILES)
def test_a_name_that_such_a_file_cannot_hold(case, name, tmp_path):
    if case is JAX_FILE and "\ud800" in name:
        pytest.skip("Orbax cannot hold this name either")
    array = torch.ones(2) if case is TORCH_FILE else np.ones(2)
    state = {name: array}
    store = case.make(tmp_path)
    store.save(1, state)
    store.wait()
    assert single_file.FILE not in files_of(only_checkpoint(tmp_path))
    assert same_states(state, store.restore(1, state).state)


def crafted(path: Path, change: Any) -> None:
    """Changes the table of a file, with the right digests."""
    header = single_file.read_header(path)
    data = path.read_bytes()
    texts = {"manifest": header.manifest, "state": header.state}
    table = json.loads(json.dumps(header.table))
    change(table)

    def write() -> None:
        raw = single_file._header_bytes({"__metadata__": texts, **table})
        path.write_bytes(len(raw).to_bytes(8, "little") + raw + data[header.start :])

    write()
    sealed = checksums.unseal(header.manifest.encode())
    sealed["files"][single_file.FILE] = single_file.digest_of(path)._asdict()
    texts["manifest"] = checksums.seal(sealed).decode()
    write()


CHANGES = {
    "missing": lambda table: table.update(other=table.pop("x.a")),
    "of another dtype": lambda table: table["x.a"].update(dtype="I32"),
    "of another shape": lambda table: table["x.a"].update(shape=[2, 2]),
    "longer than its place": lambda table: table["x.a"].update(shape=[1 << 40]),
    "no shape": lambda table: table["x.a"].update(shape="four"),
    "swapped places": lambda table: table["x.a"].update(data_offsets=[16, 0]),
    "no dtype": lambda table: table["x.a"].update(dtype="Q9"),
}


@over(*SINGLE_FILES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_array_that_is_not_as_it_was_saved(case, change, tmp_path):
    live = torch.zeros(4) if case is TORCH_FILE else np.zeros(4, np.float32)
    store = case.make(tmp_path)
    store.save(1, {"x": {"a": live + 1}})
    store.wait()
    crafted(only_checkpoint(tmp_path) / single_file.FILE, change)
    with pytest.raises(CheckpointDamaged, match=single_file.FILE):
        store.restore(1, {"x": {"a": live}})
    assert not live.any()


def test_dtypes_of_ml_dtypes_come_back(tmp_path):
    store = JAX_FILE.make(tmp_path)
    names = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "int4")
    state = {"x": {name: np.ones(3, getattr(ml_dtypes, name)) for name in names}}
    store.save(1, state)
    store.wait()
    assert files_of(only_checkpoint(tmp_path)) == [single_file.FILE]
    for name, array in store.restore(1, state).state["x"].items():
        assert same(array, state["x"][name]), name
