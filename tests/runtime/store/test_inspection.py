"""The finite check reads bits; these tests give it values of every float format."""

from __future__ import annotations

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import torch

from healcore.runtime.store.host_memory import finite

FLOATS = [
    np.float16, np.float32, np.float64, np.complex64, np.complex128, ml_dtypes.bfloat16,
    ml_dtypes.float8_e3m4, ml_dtypes.float8_e4m3, ml_dtypes.float8_e4m3b11fnuz,
    ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e4m3fnuz, ml_dtypes.float8_e5m2,
    ml_dtypes.float8_e5m2fnuz, ml_dtypes.float8_e8m0fnu,
]  # fmt: skip
SMALL = [dtype for dtype in FLOATS if np.dtype(dtype).itemsize <= 2]


def check(array: np.ndarray) -> bool:
    return finite(array.reshape(-1).view(np.uint8), array.dtype.name)


@pytest.mark.parametrize("dtype", SMALL, ids=lambda dtype: np.dtype(dtype).name)
def test_every_bit_pattern_of_a_small_format(dtype):
    bits = np.uint8 if np.dtype(dtype).itemsize == 1 else np.uint16
    for pattern in range(np.iinfo(bits).max + 1):
        array = np.array([pattern], bits).view(dtype)
        assert check(array) == bool(np.isfinite(array.astype(np.float32))[0]), pattern


@pytest.mark.parametrize("dtype", FLOATS, ids=lambda dtype: np.dtype(dtype).name)
def test_one_bad_number_anywhere(dtype):
    for at in (0, 1, 1000, -1):
        array = np.ones(1 << 14, dtype)
        assert check(array)
        array[at] = np.nan
        assert not check(array), at


@pytest.mark.parametrize("number", [np.nan, -np.nan, np.inf, -np.inf, 1e39])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, np.complex128, np.float64])
def test_finite_values_are_finite(number, dtype):
    with np.errstate(over="ignore"):
        array = np.array([0.0, -0.0, number, 1e-45, 3.4e38]).astype(dtype)
    assert check(array) == bool(np.isfinite(array).all())


def test_whole_numbers_always_are():
    for dtype in (np.int8, np.uint64, np.bool_, ml_dtypes.int4):
        assert check(np.array([1, 0, 1]).astype(dtype))
    assert check(np.zeros(0, np.float32))


def test_the_names_are_those_of_the_frameworks():
    for name in ("bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "float8_e5m2"):
        assert str(getattr(torch, name)) == f"torch.{name}"
        assert jnp.dtype(name).name == name
