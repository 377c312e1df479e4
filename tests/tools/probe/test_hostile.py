"""Files broken on purpose: a message and a verdict, never a traceback."""

from __future__ import annotations

import json
import shutil
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict_saver import save as save_dcp

from healcore.tools.probe import checkpoint, optimizer
from healcore.tools.probe.inputs import CheckpointInputs, OptimizerInputs
from healcore.tools.probe.result import ProbeResult, dumps, judged
from tests.tools.cli.test_probe import run


def adam(**extra: Any) -> dict[str, Any]:
    """The state of twelve parameters."""
    generator = torch.Generator().manual_seed(0)
    state = {
        number: {
            "step": torch.tensor(200.0),
            "exp_avg": torch.randn(16, 16, generator=generator) * 1e-3,
            "exp_avg_sq": torch.rand(16, 16, generator=generator) * 1e-6 + 1e-7,
            **extra,
        }
        for number in range(12)
    }
    group = {"lr": 1e-3, "betas": (0.9, 0.999), "params": list(range(12))}
    return {"state": state, "param_groups": [group]}


def checked(probe: str, path: Path, status: int, *expected: str) -> ProbeResult:
    """Checks the exit status and that the messages contain what is expected."""
    judge, inputs = {
        "checkpoint": (checkpoint.judge, CheckpointInputs()),
        "optimizer": (optimizer.judge, OptimizerInputs()),
    }[probe]
    result = judged(probe, str(path), judge, path, inputs)
    messages = " ".join(check.message for check in result.checks)
    assert result.verdict.exit_code == status, messages
    assert all(part in messages for part in expected), messages
    return result


def test_shards_of_dcp_without_their_index(tmp_path):
    save_dcp({"a": torch.ones(5)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / ".metadata").unlink()
    for probe in ("checkpoint", "optimizer"):
        checked(probe, tmp_path / "c", 3, "no .metadata")


def test_a_single_tensor(tmp_path):
    torch.save(torch.ones(3), tmp_path / "one.pt")
    checked("checkpoint", tmp_path / "one.pt", 0)
    checked("optimizer", tmp_path / "one.pt", 3)


def test_nested_tensors_are_reported(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": nested, "v": torch.ones(2)}, tmp_path / "n.pt")
    result = checked("checkpoint", tmp_path / "n.pt", 0)
    assert "w was not looked at" in result.notes[0]


@pytest.fixture
def archive(tmp_path):
    path = tmp_path / "ok.pt"
    torch.save(adam(), path)
    return path


def spoil(path: Path, at: int, bits: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= bits
    path.write_bytes(data)


def test_a_name_in_the_list_of_an_archive(archive):
    with zipfile.ZipFile(archive) as opened:
        (record,) = (each for each in opened.infolist() if each.filename.endswith("/data/5"))
    spoil(archive, record.header_offset + 30, 0x80)  # not UTF-8 any more
    checked("checkpoint", archive, 2, "archive is damaged")


def test_archives_in_a_directory_are_looked_at_too(archive, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(archive, folder / "optimizer.pt")
    checked("checkpoint", folder, 0, "CRC-32 of all")
    data = archive.read_bytes()
    at = data.index(adam()["state"][3]["exp_avg"].numpy().tobytes())
    spoil(folder / "optimizer.pt", at, 1)
    checked("checkpoint", folder, 2, "optimizer.pt", "CRC-32 differs")


def header(path: Path, text: str, data: bytes) -> Path:
    path.write_bytes(len(text).to_bytes(8, "little") + text.encode() + data)
    return path


def entry(first: int, last: int, dtype: str = "F32") -> str:
    size = (last - first) // 4
    return f'{{"dtype":"{dtype}","shape":[{size}],"data_offsets":[{first},{last}]}}'


@pytest.mark.parametrize(
    "text",
    [
        f'{{"w":{entry(0, 8, "ZZ")},"v":{entry(8, 16)}}}',
        f'{{"w":{entry(0, 12)},"v":{entry(8, 16)}}}',
    ],
    ids=["dtype", "overlap"],
)
def test_safetensors_that_the_library_refuses(tmp_path, text):
    path = header(tmp_path / "f.safetensors", text, bytes(16))
    checked("checkpoint", path, 2, "safetensors rejects its header")


@pytest.mark.parametrize(
    ("extra", "status", "expected"),
    [
        ({"exp_avg": torch.zeros(0, 3), "exp_avg_sq": torch.zeros(0, 3)}, 3, "no elements"),
        ({"exp_avg_sq": torch.ones(16, 16, dtype=torch.int8)}, 3, "integers (int8)"),
        ({"step": torch.tensor(float("nan"))}, 2, "step is nan"),
    ],
)
def test_moments_that_cannot_be_judged(tmp_path, extra, status, expected):
    torch.save(adam(**extra), tmp_path / "m.pt")
    checked("optimizer", tmp_path / "m.pt", status, expected)


def test_complex_moments_have_two_parts(tmp_path):
    squares = torch.full((16, 16), 1e-6 + 2e-6j)
    torch.save(adam(exp_avg_sq=squares), tmp_path / "c.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        result = checked("optimizer", tmp_path / "c.pt", 0)
    assert result.facts["elements"] == 12 * 16 * 16 * 2
    squares[3, 3] = torch.tensor(complex(1e-6, -1e-6))
    torch.save(adam(exp_avg_sq=squares), tmp_path / "c.pt")
    checked("optimizer", tmp_path / "c.pt", 2, "below 0")


def test_half_a_surrogate_pair_in_a_name():
    text = dumps([ProbeResult("checkpoint", "a\udc80", ())], CheckpointInputs())
    assert json.loads(text.encode())["results"][0]["subject"] == "a\udc80"


def test_names_cannot_write_on_the_terminal(tmp_path):
    torch.save({"a\x1b[31m\x07b": torch.tensor([float("nan")])}, tmp_path / "n.pt")
    result = run("checkpoint", tmp_path / "n.pt")
    assert result.exit_code == 2
    assert "\x1b[31m" not in result.output
    assert "\x07" not in result.output
    assert "a\\x1b[31m" in result.output.replace("\n", "")
