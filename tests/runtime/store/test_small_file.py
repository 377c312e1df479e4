"""Checkpoints of small states, whose arrays are one file of safetensors."""

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file as load_numpy
from safetensors.numpy import save
from safetensors.torch import load_file as load_torch

from healcore.runtime.store.array_format import SMALL_FILE
from healcore.runtime.store.checkpoints import CheckpointDamaged
from healcore.torch.store import DCPStore
from tests.hostile.run_directories import sealed_again
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

FILE = f"data/{SMALL_FILE}"
"""Path of the file in the directory of its checkpoint."""
LARGE = {TORCH_FILE: DCP, JAX_FILE: ORBAX}
"""The case that writes the same states in the files of the framework."""


def only_checkpoint(root: Path) -> Path:
    (folder,) = root.glob("step-*")
    return folder


def files_of(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@over(*SINGLE_FILES)
def test_both_forms_are_read_by_both_stores(case, tmp_path):
    """So a run goes on whose state grows, and a run of an earlier version."""
    large = LARGE[case]
    store, other = case.make(tmp_path), large.make(tmp_path)
    for step, each in ((1, store), (2, other)):
        each.save(step, case.state(step), record={"step": step})
        each.wait()
    names = [FILE in files_of(folder) for folder in sorted(tmp_path.glob("step-*"))]
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
    store.format.small_bytes = 10_000
    state = case.state(1)
    for step, large in ((1, np.zeros(9000, np.uint8)), (2, np.zeros(10_000, np.uint8))):
        state["values"]["large"] = large
        store.save(step, state)
        store.wait()
        (folder,) = tmp_path.glob(f"step-*{step}.1")
        assert (FILE in files_of(folder)) == (step == 1)
        assert same_states(state, store.restore(step, state).state)


def test_safetensors_reads_the_arrays_without_healcore(tmp_path):
    weights = {
        "kernel": torch.arange(6.0).reshape(2, 3),
        "half": torch.arange(4).bfloat16(),
        "transposed": torch.arange(6).reshape(2, 3).t(),
    }
    store = DCPStore(tmp_path)
    store.save(1, {"model": weights})
    store.wait()
    path = only_checkpoint(tmp_path) / FILE
    found = load_torch(path)
    for name, tensor in weights.items():
        assert same(found[f"model.{name}"], tensor.contiguous()), name
    del weights["half"]
    store.save(2, {"model": weights})
    store.wait()
    store.delete(1)
    found = load_numpy(only_checkpoint(tmp_path) / FILE)
    assert found["model.kernel"].tolist() == [[0, 1, 2], [3, 4, 5]]


@over(*SINGLE_FILES)
def test_a_name_that_such_a_file_cannot_hold(case, tmp_path):
    array = torch.ones(2) if case is TORCH_FILE else np.ones(2)
    state = {"__metadata__": array}
    store = case.make(tmp_path)
    store.save(1, state)
    store.wait()
    assert FILE not in files_of(only_checkpoint(tmp_path))
    assert same_states(state, store.restore(1, state).state)


CHANGES = {
    "missing": lambda arrays: arrays.update(other=arrays.pop("x.a")),
    "longer": lambda arrays: arrays.update({"x.a": np.zeros(5, np.float32)}),
    "no file of safetensors": lambda arrays: arrays.clear(),
}


@over(*SINGLE_FILES)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_an_array_that_is_not_as_it_was_saved(case, change, tmp_path):
    live = torch.zeros(4) if case is TORCH_FILE else np.zeros(4, np.float32)
    store = case.make(tmp_path)
    store.save(1, {"x": {"a": live + 1}})
    store.wait()
    folder = only_checkpoint(tmp_path)
    arrays = load_numpy(folder / FILE)
    change(arrays)
    (folder / FILE).write_bytes(save(arrays) if arrays else b"nothing")
    sealed_again(folder)
    with pytest.raises(CheckpointDamaged, match=folder.name):
        store.restore(1, {"x": {"a": live}})
    assert not live.any()


def test_dtypes_of_ml_dtypes_come_back(tmp_path):
    store = JAX_FILE.make(tmp_path)
    for step, names in enumerate((["bfloat16"], ["float8_e4m3fn", "float8_e8m0fnu", "int4"])):
        state = {"x": {name: np.ones(3, getattr(ml_dtypes, name)) for name in names}}
        store.save(step, state)
        store.wait()
        for name, array in store.restore(step, state).state["x"].items():
            assert same(array, state["x"][name]), name
    names = [FILE in files_of(folder) for folder in sorted(tmp_path.glob("step-*"))]
    assert names == [True, False]
