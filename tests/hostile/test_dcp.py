"""Directories of DCP whose index or whose parts are crafted."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from tests.hostile.pickles import (
    BEGIN,
    END,
    called,
    changed_index,
    dcp,
    doubled,
    named,
    nested,
    number,
    text,
    torch_file,
)

_CLASSES = "torch.distributed.checkpoint.metadata"


def test_a_file_that_changes_the_classes_of_the_index(reader, tmp_path):
    good, bad = dcp(tmp_path / "good"), dcp(tmp_path / "bad", w=torch.tensor([float("nan")]))
    for at, name in enumerate(("Metadata", "TensorStorageMetadata", "TensorProperties")):
        attributes = b"N}" + text("__setstate__") + named("collections.OrderedDict") + b"s\x86b"
        evil = dcp(tmp_path / str(at), BEGIN + named(f"{_CLASSES}.{name}") + attributes + END)
        outcome = reader.probe("checkpoint", evil, good, bad)
        assert outcome.verdicts() == ["ERROR", "PASS", "FAIL"]


BOMBS = {
    "memo": BEGIN + b"Nr\xff\xff\xff\x0f" + END,
    "doubled lists": BEGIN + doubled(200) + END,
    "nested": BEGIN + nested(400_000) + END,
    "nested keys": BEGIN + b"})" + b"\x85" * 400_000 + b"Ns" + END,
    "bytearray": BEGIN + called("builtins.bytearray", number(10**11)) + END,
    "no end": BEGIN + b"X\xff\xff\xff\xff",
    "a frame": b"\x80\x04\x95" + b"\xff" * 8 + END,
    "code": BEGIN + called("os.system", text("exit 1")) + END,
    "an old protocol": b"cos\nsystem\n(S'exit 1'\ntR.",
}


@pytest.mark.parametrize("name", BOMBS)
def test_an_index_that_is_none(reader, tmp_path, name):
    outcome = reader.probe("checkpoint", dcp(tmp_path / "c", BOMBS[name]))
    assert outcome.status == 3
    assert "damaged" in outcome.messages()


def test_nested_planner_data(reader, tmp_path):
    def double(metadata):
        place = ["a", "b"]
        for _ in range(60):
            place = [place, place]
        metadata.planner_data = {"w": tuple(place)}

    assert reader.probe("checkpoint", changed_index(dcp(tmp_path / "c"), double)).status == 0


def test_planner_data_with_a_million_dots(reader, tmp_path):
    def long(metadata):
        place = ("." * 50_000,) * 200
        tensors = metadata.state_dict_metadata
        for number_ in range(2000):
            tensors[f"w{number_}"] = tensors["w"]
        metadata.planner_data = dict.fromkeys(tensors, place)

    assert reader.probe("checkpoint", changed_index(dcp(tmp_path / "c"), long)).status == 3


def replaced(what, **changes):
    """A frozen part of the index with other attributes."""
    return dataclasses.replace(what, **changes)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"relative_path": "../secret"}, "outside"),
        ({"relative_path": "/etc/passwd"}, "outside"),
        ({"length": 10**12}, "damaged"),
        ({"offset": 10**18}, "damaged"),
        ({"offset": -1}, "offset"),
        ({"length": "x"}, "offset"),
        ({"relative_path": "."}, "cannot be read"),
    ],
)  # fmt: skip
def test_a_place_that_is_none(reader, tmp_path, changes, expected):
    def move(metadata):
        for index, place in metadata.storage_data.items():
            metadata.storage_data[index] = replaced(place, **changes)

    result = reader.probe("checkpoint", changed_index(dcp(tmp_path / "c"), move))
    assert result.status == 3
    assert expected in result.messages()


def test_a_shape_of_large_numbers(reader, tmp_path):
    def grow(metadata):
        metadata.state_dict_metadata["w"].size = torch.Size([10**18, 2**40])

    assert reader.probe("checkpoint", changed_index(dcp(tmp_path / "c"), grow)).status == 3


def test_a_thousand_names_for_one_part(reader, tmp_path):
    def repeat(metadata):
        (place,) = metadata.storage_data.values()
        (index,) = metadata.storage_data
        for number_ in range(1000):
            name = f"w{number_}"
            metadata.state_dict_metadata[name] = metadata.state_dict_metadata["w"]
            metadata.storage_data[replaced(index, fqn=name)] = place

    folder = dcp(tmp_path / "c", w=torch.ones(1000))
    outcome = reader.probe("checkpoint", changed_index(folder, repeat))
    assert outcome.status == 3
    assert "overlap" in outcome.messages()


def test_a_pipe_in_the_place_of_a_part(reader, tmp_path):
    import os

    folder = dcp(tmp_path / "c")
    (part,) = folder.glob("*.distcp")
    part.unlink()
    os.mkfifo(part)
    assert reader.probe("checkpoint", folder).status == 3


def test_a_value_that_doubles(reader, tmp_path):
    folder = dcp(tmp_path / "c", w=torch.ones(3), v="x")
    part = torch_file(folder / "x.distcp", BEGIN + doubled(200) + END)

    def move(metadata):
        for index, place in metadata.storage_data.items():
            if index.fqn == "v":
                length = part.stat().st_size
                changes = {"relative_path": part.name, "offset": 0, "length": length}
                metadata.storage_data[index] = replaced(place, **changes)

    outcome = reader.probe("checkpoint", changed_index(folder, move))
    (result,) = json.loads(outcome.answer["out"])["results"]
    assert outcome.status == 0
    assert "larger than the file" in " ".join(result["notes"])
