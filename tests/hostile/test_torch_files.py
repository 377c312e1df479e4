"""Files of torch whose pickle asks for more than is in the file."""

from __future__ import annotations

import zipfile

import pytest
import torch

from tests.hostile.pickles import (
    BEGIN,
    END,
    called,
    doubled,
    named,
    nested,
    number,
    storage,
    tensor,
    text,
    torch_file,
)

HUGE = 10**11


def dtype(name: str) -> bytes:
    return called("numpy.dtype", text(name), b"\x89", b"\x88")


def state_of(build: bytes) -> bytes:
    return BEGIN + build + END


BOMBS = {
    "memo": BEGIN + b"Nr\xff\xff\xff\x0f" + END,
    "bytearray": state_of(called("builtins.bytearray", number(HUGE))),
    "tensor by size": state_of(called("torch.Tensor", number(HUGE))),
    "storage by size": state_of(called("torch.FloatStorage", number(HUGE))),
    "text of 2**31 bytes": BEGIN + b"X\xff\xff\xff\x7fabc",
    "bytes of 2**62 bytes": BEGIN + b"\x8e" + (1 << 62).to_bytes(8, "little"),
    "doubled lists": state_of(doubled(200)),
    "nested lists": state_of(nested(400_000)),
    "nested tuples as a key": state_of(b"})" + b"\x85" * 400_000 + b"Ns"),
    "doubled tuples as a key": state_of(b"}K\x01" + b"2\x86" * 400 + b"Ns"),
    "a number of 300,000 digits": state_of(b"}" + text("n") + number(10**300_000) + b"s"),
    "such a number as a key": state_of(b"}" + number(10**300_000) + b"Ns"),
    "a million dots": state_of(b"}" + text("." * 60_000) + b"q\x00Nsh\x00Ns"),
    "state of a class": state_of(named("torch.Tensor") + b"}" + text("sum") + b"Nsb"),
    "state of a dtype": state_of(
        dtype("f8") + b"(K\x03" + text(">") + b"NNNK\x01K\x01K\x00tb"
    ),
    "a dtype of gigabytes": state_of(dtype("(1000000000,)f8")),
    "a codec": state_of(called("_codecs.encode", text("x" * 300_000), text("idna"))),
    "no storage": state_of(
        called("torch._utils._rebuild_qtensor", storage(1), number(0), number(HUGE), b")", b")")
    ),
    "beyond its storage": state_of(b"}" + text("w") + tensor((HUGE,), (1,), 4) + b"s"),
    "a shape of large numbers": state_of(
        b"}" + text("w") + tensor((10**5000,) * 3, (1,) * 3, 4) + b"s"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BOMBS)
def test_a_pickle_cannot_ask_for_more_than_the_file_has(reader, tmp_path, name):
    path = torch_file(tmp_path / "bomb.pt", BOMBS[name], {"data/0": bytes(16)})
    for probe in ("checkpoint", "optimizer"):
        assert reader.probe(probe, path).status in (2, 3)


@pytest.mark.parametrize("name", ["memo", "bytearray", "nested lists", "doubled lists"])
def test_a_file_of_old_torch(reader, tmp_path, name):
    begin = BEGIN + number(0x1950A86A20F9469CFC6C) + END + BEGIN + number(1001) + END
    path = tmp_path / "old.pt"
    path.write_bytes(begin + BEGIN + b"}" + END + BOMBS[name] + BEGIN + b"]" + END)
    assert reader.probe("checkpoint", path).status == 3


def test_storage_of_old_torch_that_is_not_there(reader, tmp_path):
    begin = BEGIN + number(0x1950A86A20F9469CFC6C) + END + BEGIN + number(1001) + END
    path = tmp_path / "old.pt"
    state = state_of(tensor((HUGE,), (1,), HUGE))
    path.write_bytes(begin + BEGIN + b"}" + END + state + BEGIN + b"](" + text("0") + b"e" + END)
    outcome = reader.probe("checkpoint", path)
    assert outcome.status == 3
    assert "cut short" in outcome.messages()


def test_old_files_of_torch_are_read(reader, tmp_path):
    path = tmp_path / "old.pt"
    torch.save({"w": torch.ones(5)}, path, _use_new_zipfile_serialization=False)
    assert reader.probe("checkpoint", path).status == 0


def test_records_that_unpack_to_gigabytes(reader, tmp_path):
    path = tmp_path / "bomb.pt"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        archive.writestr("archive/data.pkl", BEGIN + b"}" + END)
        with archive.open("archive/data/0", "w", force_zip64=True) as file:
            for _ in range(1100):
                file.write(bytes(1 << 20))
    outcome = reader.probe("checkpoint", path, seconds=5)
    assert outcome.status == 3
    assert "compressed" in outcome.messages()


def test_two_records_of_one_name(reader, tmp_path):
    path = torch_file(tmp_path / "two.pt", BEGIN + b"}" + END)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("archive/DATA.PKL", BOMBS["bytearray"])
    assert reader.probe("checkpoint", path).status == 2


def test_nothing_runs(reader, tmp_path):
    ran = tmp_path / "ran"
    for code in (
        called("os.system", text(f"touch {ran}")),
        called("builtins.exec", text(f"open({str(ran)!r}, 'w')")),
        named("builtins.eval") + b"(" + text(f"open({str(ran)!r}, 'w')") + b"t\x81",
        called("builtins.getattr", named("os.path"), text("os")),
    ):
        path = torch_file(tmp_path / "evil.pt", BEGIN + code + END)
        outcome = reader.probe("checkpoint", path)
        assert outcome.status == 3
        assert "could execute" in outcome.messages()
    assert not ran.exists()
