"""Files of safetensors whose header is crafted."""

from __future__ import annotations

import json

import pytest


def entry(shape: object, last: int = 8, dtype: object = "F32") -> dict[str, object]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, last]}


HEADERS = {
    "digits": '{"w": {"dtype": "F32", "shape": [' + "9" * 400_000 + '], "data_offsets": [0, 8]}}',
    "many numbers of 4,000 digits": json.dumps({"w": entry([10**4000] * 200)}),
    "as many zeros": json.dumps({"w": entry([10**4000] * 200 + [0], 0)}),
    "a million sizes": json.dumps({"w": entry([2] * 1_000_000)}),
    "nested": '{"w": ' + "[" * 400_000,
    "a dtype of a megabyte": json.dumps({"w": entry([2], dtype="x" * 10**6)}),
    "no text as dtype": json.dumps({"w": entry([2], dtype=["x"])}),
    "a name of dots": json.dumps({"." * 900_000: entry([2])}),
    "no objects": json.dumps({"w": 3}),
    "lists": '{"w": [' + "[]," * 300_000 + "[]]}",
    "offsets without end": json.dumps({"w": entry([2], 1 << 200)}),
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_header_that_is_none(reader, tmp_path, name):
    header = HEADERS[name].encode()
    path = tmp_path / "w.safetensors"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    for probe in ("checkpoint", "optimizer"):
        assert reader.probe(probe, path).status in (2, 3)


@pytest.mark.parametrize("length", [100_000_001, 1 << 40, (1 << 64) - 1])
def test_a_header_of_more_than_there_is(reader, tmp_path, length):
    path = tmp_path / "w.safetensors"
    with path.open("wb") as file:
        file.write(length.to_bytes(8, "little") + b'{"w":')
        file.truncate(200_000_000)
    assert reader.probe("checkpoint", path).status == 3
