"""Orbax checkpoints whose index, whose arrays or whose chunks are crafted."""

from __future__ import annotations

import json
import zlib

import numpy as np
import pytest

MEMORY_MIB = 1 << 20
"""A memory limit for the process of TensorStore, whose own limit is half of the machine's."""


def item(folder, content=b"", compressor=None, name="w", **zarray):
    """An item of one zarr array, as Orbax writes it without OCDBT."""
    folder.mkdir(exist_ok=True)
    (folder / name).mkdir()
    array = {
        "zarr_format": 2, "shape": [4], "chunks": [4], "dtype": "<f4", "compressor": compressor,
        "fill_value": None, "order": "C", "filters": None, "dimension_separator": ".", **zarray,
    }  # fmt: skip
    (folder / name / ".zarray").write_text(json.dumps(array))
    (folder / name / "0").write_bytes(content)
    index(folder, *(each.name for each in folder.iterdir() if each.is_dir()))
    return folder


def index(folder, *names):
    entries = {
        str((name,)): {
            "key_metadata": [{"key": name, "key_type": 2}],
            "value_metadata": {"value_type": "jax.Array", "skip_deserialize": False},
        }
        for name in names
    }
    tree = {"tree_metadata": entries, "use_ocdbt": False, "use_zarr3": False}
    (folder / "_METADATA").write_text(json.dumps(tree))


GOOD = np.ones(4, np.float32).tobytes()
ZLIB = {"id": "zlib", "level": 9}
CRAFTED = {
    "a chunk that unpacks to a gigabyte": {
        "content": zlib.compress(bytes(1 << 20)) * 1,
        "compressor": ZLIB,
        "shape": [1 << 38],
        "chunks": [1 << 38],
    },
    "a chunk of more than any memory": {"content": GOOD, "shape": [1 << 50], "chunks": [1 << 50]},
    "chunks without end": {"content": GOOD, "shape": [1 << 50], "chunks": [4]},
    "blosc": {
        "content": b"\x02\x01\x33\x04" + b"\xff" * 12 + bytes(64),
        "compressor": {"id": "blosc", "cname": "lz4", "clevel": 5, "shuffle": 1, "blocksize": 0},
    },
    "zstd": {"content": b"\x28\xb5\x2f\xfd" + b"\xff" * 30, "compressor": {"id": "zstd"}},
    "no dtype": {"content": GOOD, "dtype": "<f400"},
    "a shape below 0": {"content": GOOD, "shape": [-4]},
}


@pytest.mark.parametrize("name", CRAFTED)
def test_an_array_costs_no_other_path_its_verdict(reader, tmp_path, name):
    bad = item(tmp_path / "bad", **CRAFTED[name])
    good = item(tmp_path / "good", GOOD)
    nan = item(tmp_path / "nan", np.full(4, np.nan, np.float32).tobytes())
    outcome = reader.probe("checkpoint", bad, good, nan, seconds=60)
    assert outcome.verdicts() == ["ERROR", "PASS", "FAIL"]


def test_nor_another_array_of_its_own(reader, tmp_path):
    folder = item(tmp_path / "c", **CRAFTED["a chunk of more than any memory"])
    item(folder, np.full(4, np.nan, np.float32).tobytes(), name="nan")
    outcome = reader.probe("checkpoint", folder, seconds=60)
    assert outcome.verdicts() == ["FAIL"]
    assert "nan" in outcome.messages()


@pytest.mark.parametrize(
    "text",
    ["[" * 300_000, "{}", '{"tree_metadata": 3}', '{"tree_metadata": {"a": {"key_metadata": 3}}}'],
)
def test_an_index_that_is_none(reader, tmp_path, text):
    (tmp_path / "_METADATA").write_text(text)
    assert reader.probe("checkpoint", tmp_path).status == 3


def test_names_that_lead_out_of_it(reader, tmp_path):
    item(tmp_path / "secret", GOOD)
    folder = item(tmp_path / "c", GOOD)
    index(folder, "../secret/w")
    assert reader.probe("checkpoint", folder).status == 3
