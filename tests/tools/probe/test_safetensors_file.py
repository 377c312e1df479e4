"""safetensors files, read without the package and held against it."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from healcore.tools.probe.checkpoint import check_finite
from healcore.tools.probe.result import ProbeError
from healcore.tools.probe.safetensors_file import decode_elements, read_safetensors

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e5m2,
    torch.float8_e4m3fn, torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
]  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype(tmp_path, dtype):
    values = (torch.randn(7, 9) * 3).to(dtype)
    save_file({"x": values, "empty": torch.zeros(0, 3), "one": torch.tensor(2.5)}, tmp_path / "f")
    arrays = {array.path: array for array in read_safetensors(tmp_path / "f").arrays}
    assert arrays["x",].dtype == str(dtype).removeprefix("torch.")
    read = np.concatenate(list(arrays["x",].read()))
    expected = values.reshape(-1).float() if dtype.is_floating_point else values.reshape(-1)
    np.testing.assert_array_equal(read.astype(np.float64), expected.double().numpy())
    assert arrays["one",].scalar() == 2.5
    assert list(arrays["empty",].read()) == []


def test_all_256_small_floats():
    raw = np.arange(256, dtype=np.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        expected = torch.from_numpy(raw.copy()).view(dtype).float().numpy()
        np.testing.assert_array_equal(
            decode_elements(raw, str(dtype).removeprefix("torch.")), expected
        )


@settings(max_examples=60)
@given(st.data())
def test_a_damaged_file_is_an_error_and_never_a_traceback(tmp_path_factory, data):
    path: Path = tmp_path_factory.mktemp("damaged") / "f.safetensors"
    save_file({"a.b": torch.randn(5, 3), "c": torch.zeros(4, dtype=torch.int32)}, path)
    whole = path.read_bytes()
    spoilt = bytearray(whole)
    if data.draw(st.booleans()):
        spoilt = spoilt[: data.draw(st.integers(0, len(whole) - 1))]
    else:
        at = data.draw(st.integers(0, len(whole) - 61))  # in the header
        spoilt[at] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(spoilt))
    try:
        check_finite(read_safetensors(path))
    except ProbeError as error:
        assert str(path) in str(error)


def test_memory_stays_small_compared_with_the_file(tmp_path):
    save_file({"big": torch.zeros(12 << 20), "other": torch.ones(3)}, tmp_path / "f")
    contents = read_safetensors(tmp_path / "f")
    tracemalloc.start()
    assert check_finite(contents).nonfinite == {}
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20  # of 48 MiB
