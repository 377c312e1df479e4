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

from healcore.tools.cli.probe import probe_each
from healcore.tools.probe.checkpoint import probe_checkpoint
from healcore.tools.probe.inputs import CheckpointInputs
from healcore.tools.probe.optimizer import probe_optimizer
from healcore.tools.probe.result import ProbeResult, dumps
from healcore.tools.probe.safetensors_file import decode_elements
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


def judged(probe: str, path: Path, status: int, *expected: str) -> None:
    """Checks the exit status and that the messages contain what is expected."""
    result = run(probe, path, "--json")
    assert result.exit_code == status, (result.output, result.exception)
    (found,) = json.loads(result.output)["results"]
    messages = " ".join(check["message"] for check in found["checks"])
    assert all(part in messages for part in expected), messages


def test_whatever_reading_raises_is_an_error_that_names_the_path(tmp_path):
    def spoilt(path: Path, inputs: Any) -> ProbeResult:
        raise {"a": KeyError("x"), "b": RecursionError("too deep")}[path.name]

    results = probe_each("checkpoint", [tmp_path / "a", tmp_path / "b"], spoilt, CheckpointInputs())
    assert [result.verdict.value for result in results] == ["ERROR", "ERROR"]
    assert "RecursionError: too deep" in results[1].checks[0].message
    assert str(tmp_path / "b") in results[1].checks[0].message


def test_shards_of_dcp_without_their_index(tmp_path):
    save_dcp({"a": torch.ones(5)}, checkpoint_id=tmp_path / "c", no_dist=True)
    (tmp_path / "c" / ".metadata").unlink()
    for probe in ("checkpoint", "optimizer"):
        judged(probe, tmp_path / "c", 3, "no .metadata")


def test_a_single_tensor(tmp_path):
    torch.save(torch.ones(3), tmp_path / "one.pt")
    judged("checkpoint", tmp_path / "one.pt", 0)
    judged("optimizer", tmp_path / "one.pt", 3)


def test_a_value_that_contains_itself(tmp_path):
    state = adam()
    state["self"] = state
    torch.save(state, tmp_path / "self.pt")
    for probe in ("checkpoint", "optimizer"):
        judged(probe, tmp_path / "self.pt", 3, "its tree is cyclic")


def test_nested_tensors_are_reported(tmp_path):
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])
    torch.save({"w": nested, "v": torch.ones(2)}, tmp_path / "n.pt")
    result = probe_checkpoint(tmp_path / "n.pt")
    assert "w was not looked at" in result.notes[0]


def test_beta2_of_1(tmp_path):
    state = adam()
    state["param_groups"][0]["betas"] = (0.9, 1.0)
    torch.save(state, tmp_path / "b.pt")
    judged("optimizer", tmp_path / "b.pt", 0)


def test_an_index_of_orbax_without_end(tmp_path):
    (tmp_path / "_METADATA").write_text("[" * 100_000)
    judged("checkpoint", tmp_path, 3, "_METADATA is damaged")


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
    judged("checkpoint", archive, 2, "the archive is damaged")


def test_archives_in_a_directory_are_looked_at_too(archive, tmp_path):
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(archive, folder / "optimizer.pt")
    judged("checkpoint", folder, 0, "CRC-32 of all")
    data = archive.read_bytes()
    at = data.index(adam()["state"][3]["exp_avg"].numpy().tobytes())
    spoil(folder / "optimizer.pt", at, 1)
    judged("checkpoint", folder, 2, "optimizer.pt", "CRC-32 differs")


def test_a_record_that_is_shorter_than_its_tensor(archive, tmp_path):
    short = tmp_path / "short.pt"
    with zipfile.ZipFile(archive) as whole, zipfile.ZipFile(short, "w") as cut:
        for name in whole.namelist():
            content = whole.read(name)
            cut.writestr(name, content[:10] if name.endswith("/data/4") else content)
    for probe in ("checkpoint", "optimizer"):
        judged(probe, short, 2, "data/4 is shorter than its tensor")
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(short, folder)
    judged("checkpoint", folder, 2, "data/4 is shorter than its tensor")


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
        f'{{"w":{entry(0, 4)},"v":{entry(8, 16)}}}',
        f'{{"w":{entry(0, 8)},"w":{entry(8, 16)}}}',
        f'{{"__metadata__":{{"a":1}},"w":{entry(0, 16)}}}',
        f'{{"w":{entry(0, 16).replace("[4]", "[4.0]")}}}',
    ],
    ids=["dtype", "overlap", "gap", "duplicate", "metadata", "shape"],
)
def test_safetensors_that_the_library_refuses(tmp_path, text):
    path = header(tmp_path / "f.safetensors", text, bytes(16))
    judged("checkpoint", path, 2, "safetensors rejects its header")


def test_bare_exponents():
    raw = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(raw.copy()).view(torch.float8_e8m0fnu).float().numpy()
    np.testing.assert_array_equal(decode_elements(raw, "float8_e8m0fnu"), expected)
    assert np.isnan(expected[255])


def test_a_view_of_one_number_is_one_number(tmp_path):
    state = adam()
    state["state"][2]["exp_avg_sq"] = torch.tensor(1e-6).expand(100_000, 100_000)
    state["state"][3]["exp_avg_sq"] = torch.full((200_000,), 1e-6).as_strided(
        (100_000, 100_000), (1, 1)
    )
    torch.save(state, tmp_path / "e.pt")
    judged("checkpoint", tmp_path / "e.pt", 0)
    assert probe_optimizer(tmp_path / "e.pt").facts["elements"] < 300_000


@pytest.mark.parametrize(
    ("extra", "status", "expected"),
    [
        ({"exp_avg": torch.zeros(0, 3), "exp_avg_sq": torch.zeros(0, 3)}, 3, "have no elements"),
        ({"exp_avg_sq": torch.ones(16, 16, dtype=torch.int8)}, 3, "integers (int8)"),
        ({"step": torch.tensor(float("nan"))}, 2, "step is nan"),
    ],
)
def test_moments_that_cannot_be_judged(tmp_path, extra, status, expected):
    torch.save(adam(**extra), tmp_path / "m.pt")
    judged("optimizer", tmp_path / "m.pt", status, expected)


def test_complex_moments_have_two_parts(tmp_path):
    squares = torch.full((16, 16), 1e-6 + 2e-6j)
    torch.save(adam(exp_avg_sq=squares), tmp_path / "c.pt")
    with warnings.catch_warnings():
        warnings.simplefilter("error", np.exceptions.ComplexWarning)
        assert probe_optimizer(tmp_path / "c.pt").facts["elements"] == 12 * 16 * 16 * 2
    squares[3, 3] = torch.tensor(complex(1e-6, -1e-6))
    torch.save(adam(exp_avg_sq=squares), tmp_path / "c.pt")
    judged("optimizer", tmp_path / "c.pt", 2, "below 0")


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
