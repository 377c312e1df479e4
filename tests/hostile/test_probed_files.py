"""Checkpoints of every format that are crafted: a verdict for each path, and no code runs."""

import json
import os
import pickle
import resource
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.numpy import save_file

from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.checkpoint_files import open_contents, probe_paths
from healcore.tools.probe.checks import CheckpointInputs, Report
from tests.hostile import reader
from tests.hostile.pickles import BEGIN, END, called, dcp, named, text, torch_file


@pytest.mark.slow
def test_no_code_of_a_torch_file_runs(tmp_path):
    ran = tmp_path / "ran"
    codes = (
        called("os.system", text(f"touch {ran}")),
        called("builtins.exec", text(f"open({str(ran)!r}, 'w')")),
        named("builtins.eval") + b"(" + text(f"open({str(ran)!r}, 'w')") + b"t\x81",
        called("builtins.getattr", named("os.path"), text("os")),
    )
    paths = [torch_file(tmp_path / f"{i}.pt", BEGIN + each + END) for i, each in enumerate(codes)]
    outcome = reader.probe("checkpoint", *paths, seconds=60)
    assert outcome.verdicts() == ["ERROR"] * 4
    assert outcome.out.count("could execute") == 4
    assert not ran.exists()


@pytest.mark.slow
def test_no_code_of_an_index_of_dcp_runs_and_no_class_of_torch_changes(tmp_path):
    """Nor is a file read that lies outside of the checkpoint."""
    ran = tmp_path / "ran"
    module = "torch.distributed.checkpoint.metadata"
    attributes = b"N}" + text("__setstate__") + named("collections.OrderedDict") + b"s\x86b"
    indexes = [
        called("os.system", text(f"touch {ran}")),
        named(f"{module}.Metadata") + attributes,
        named(f"{module}.TensorProperties") + attributes,
        named("torch.Size") + attributes,
        named("pathlib.PosixPath") + attributes,
    ]
    paths = [dcp(tmp_path / str(i), BEGIN + index + END) for i, index in enumerate(indexes)]
    for number, outside in enumerate(("../secret", "/etc/passwd"), len(paths)):
        paths.append(dcp(tmp_path / str(number)))
        index = paths[-1] / ".metadata"
        metadata = pickle.loads(index.read_bytes())
        (info,) = metadata.storage_data.values()
        info.relative_path = outside
        index.write_bytes(pickle.dumps(metadata))
    good, bad = dcp(tmp_path / "good"), dcp(tmp_path / "bad", w=torch.tensor([float("nan")]))
    outcome = reader.probe("checkpoint", *paths, good, bad, seconds=60)
    assert outcome.verdicts() == ["ERROR"] * len(paths) + ["PASS", "FAIL"]
    assert outcome.out.count("outside") == 2
    assert not ran.exists()


@pytest.mark.slow
def test_a_path_that_needs_too_much_costs_no_other_path_its_verdict(tmp_path):
    """The hash of the key of `deep` needs a stack of gigabytes, and `endless` has 2^60 lists."""
    doubled = b"]q\x00"
    for number in range(60):
        last = b"h" + bytes([number])
        doubled += b"](" + last + last + b"eq" + bytes([number + 1])
    endless = torch_file(tmp_path / "endless.pt", BEGIN + doubled + END)
    torch.save({"w": torch.ones(4)}, tmp_path / "good.pt")
    deep = torch_file(tmp_path / "deep.pt", BEGIN + b"})" + b"\x85" * 400_000 + b"Ns" + END)
    size = b"\x8a\x05" + (10**11).to_bytes(5, "little")
    large = torch_file(tmp_path / "a.pt", BEGIN + called("builtins.bytearray", size) + END)
    paths = [large, deep, endless, tmp_path / "good.pt"]
    results = probe_paths("checkpoint", probe_checkpoint, paths, CheckpointInputs())
    assert [result.verdict.value for result in results] == ["ERROR"] * 3 + ["PASS"]
    message = f"{large} could not be judged: it needs more memory than its limit"
    assert results[0].checks[0].message == message
    assert "ended" in results[1].checks[0].message
    assert "ended" in results[2].checks[0].message


def test_containers_that_several_groups_share_are_in_each_place(tmp_path):
    betas = (0.9, 0.95)  # one object in the file
    groups = [{"params": [number], "betas": betas} for number in range(30)]
    torch.save({"state": {}, "param_groups": groups}, tmp_path / "optimizer.pt")
    leaves = open_contents(tmp_path / "optimizer.pt").leaves
    assert leaves["param_groups", "29", "betas", "1"] == 0.95
    assert list(leaves)[:2] == [
        ("param_groups", "0", "params", "0"),
        ("param_groups", "0", "betas", "0"),
    ]


def orbax(folder: Path, name: str = "w", **zarray: object) -> Path:
    """An item of one zarr array of ones, as Orbax writes it without OCDBT."""
    (folder / "w").mkdir(parents=True)
    array = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": None,
        "fill_value": None, "order": "C", "filters": None, "dimension_separator": ".", **zarray,
    }  # fmt: skip
    (folder / "w" / ".zarray").write_text(json.dumps(array))
    (folder / "w" / "0").write_bytes(np.ones(4, np.float32).tobytes())
    entry = {
        "key_metadata": [{"key": name, "key_type": 2}],
        "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
    }
    tree = {"tree_metadata": {name: entry}, "use_ocdbt": False, "use_zarr3": False}
    (folder / "_METADATA").write_text(json.dumps(tree))
    return folder


def test_crafted_orbax_checkpoints_do_not_stop_the_probe_of_the_next(tmp_path):
    nested = orbax(tmp_path / "nested")
    (nested / "_METADATA").write_text("[" * 100_000)
    paths = [
        orbax(tmp_path / "crashes", shape=[1 << 50], chunks=[1 << 50]),
        orbax(tmp_path / "outside", name="../good/w"),
        nested,
        orbax(tmp_path / "good"),
    ]
    outcome = reader.probe("checkpoint", *paths, seconds=60)
    assert outcome.verdicts() == ["ERROR"] * 3 + ["PASS"]


@pytest.mark.slow
def test_crafted_safetensors_do_not_stop_the_probe_of_the_next(tmp_path):
    digits = '{"w": {"dtype": "F32", "shape": [' + "9" * 400_000 + '], "data_offsets": [0, 8]}}'
    longer = (1 << 40).to_bytes(8, "little") + b'{"w":'
    (tmp_path / "a").write_bytes(len(digits).to_bytes(8, "little") + digits.encode() + bytes(8))
    (tmp_path / "b").write_bytes(longer)
    save_file({"w": np.ones(4)}, tmp_path / "good")
    outcome = reader.probe("checkpoint", tmp_path / "a", tmp_path / "b", tmp_path / "good")
    assert outcome.verdicts() == ["FAIL", "FAIL", "PASS"]


def killed(path, inputs):
    """A probe that crashes or never ends for some paths, and reports its limits for others."""
    limits = [resource.getrlimit(kind)[0] for kind in (resource.RLIMIT_DATA, resource.RLIMIT_CPU)]
    if path.name == "crashes":
        os.abort()
    if path.name == "endless":
        resource.setrlimit(resource.RLIMIT_CPU, (1, 1))
    while path.name == "endless":
        pass
    return Report(path.name, str(path), (), {"limits": limits})


def test_a_module_next_to_a_checkpoint_is_not_imported(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("multiprocessing", "numpy"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    save_file({"w": np.ones(4)}, tmp_path / "w.safetensors")
    paths = [Path("w.safetensors")]
    (result,) = probe_paths("checkpoint", probe_checkpoint, paths, CheckpointInputs())
    assert (result.verdict.value, (tmp_path / "ran").exists()) == ("PASS", False)


@pytest.mark.slow
def test_a_process_that_ends_is_replaced(tmp_path):
    paths = [tmp_path / name for name in ("small", "crashes", "endless", "large")]
    for path in paths:
        path.touch()
    os.truncate(paths[3], 1 << 30)
    results = probe_paths("x", killed, paths, CheckpointInputs())
    assert [result.verdict.value for result in results] == ["SKIP", "ERROR", "ERROR", "SKIP"]
    assert "Aborted" in results[1].checks[0].message
    assert "ended" in results[2].checks[0].message
    small, large = results[0].facts["limits"], results[3].facts["limits"]
    assert large[0] - small[0] == 4 << 30
    assert large[1] > small[1] + 200
