"""States of loaders and generators as text: they round-trip, and nothing in them is called."""

from __future__ import annotations

import json
import random
from collections import OrderedDict
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import StoreError, UnsavableState, values
from tests.hostile.run_directories import base64_of

ARRAYS = [
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5, ">f4"),
    np.zeros((0, 4), np.int8),
    np.array(["ab", "c"]),
    np.array(["2026-01-01"], "M8[D]"),
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
]


class Pair(NamedTuple):
    left: int
    right: int


class Row(list):
    pass


def back(value: Any, **options: Any) -> Any:
    return values.loads(values.dumps(value, ("x",), **options), ("x",), **options)


@pytest.mark.parametrize("array", ARRAYS, ids=lambda each: each.dtype.name)
def test_arrays_of_numpy(array):
    found = back({"a": [array]})["a"][0]
    assert (found.dtype, found.shape) == (array.dtype, array.shape)
    assert found.tobytes() == array.tobytes()
    assert found.flags.writeable


def test_the_generators_of_python_and_numpy():
    ours, numpys = random.Random(3), np.random.RandomState(4)
    ours.gauss(0, 1)
    numpys.normal(size=3)
    again, numpys_again = random.Random(), np.random.RandomState()
    again.setstate(back(ours.getstate()))
    numpys_again.set_state(back(numpys.get_state()))
    assert [again.gauss(0, 1) for _ in range(700)] == [ours.gauss(0, 1) for _ in range(700)]
    assert (numpys_again.normal(size=700) == numpys.normal(size=700)).all()
    new, drawn = np.random.default_rng(5), np.random.default_rng()
    new.random(3)
    drawn.bit_generator.state = back(new.bit_generator.state)
    assert (drawn.random(9) == new.random(9)).all()


def test_values_of_torch():
    generator = torch.Generator().manual_seed(3)
    value = {
        "state": generator.get_state(),
        "half": torch.arange(4.0).bfloat16()[::2],
        "parameter": torch.nn.Parameter(torch.ones(2)),
        "scalar": torch.tensor(True),
        "empty": torch.zeros(0, 3),
        "frozen": torch.nn.Parameter(torch.ones(2), requires_grad=False),
        "dtype": torch.float8_e4m3fn,
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
    }
    found = back(value)
    for name, each in value.items():
        if isinstance(each, torch.Tensor):
            assert found[name].dtype == each.dtype
            assert torch.equal(found[name], each.detach())
            assert type(found[name]) is type(each)
            assert found[name].requires_grad == each.requires_grad
        else:
            assert found[name] == each
            assert type(found[name]) is type(each)


def test_values_of_jax():
    key = jax.random.key(7)
    found = back({"key": key, "array": jax.numpy.arange(3, dtype="bfloat16")})
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(key)).all()
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(key)
    assert found["array"].dtype == "bfloat16"


@pytest.mark.parametrize(
    "value",
    [Row([1, 2]), np.array([Pair(1, 2)], object), torch.eye(2).to_sparse(), OrderedDict],
    ids=["list of its own", "array of objects", "sparse", "class"],
)
def test_without_a_plain_form(value):
    with pytest.raises(UnsavableState, match=r"state\['x'\]\['at'\]\[1\]"):
        values.dumps({"at": [0, value]}, ("x",))


NODES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just(base64_of(b"abcd"))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from([
                "dict", "type", "versions", "list", "tuple", "deque", "maxlen", "set", "range",
                "bytes", "float", "complex", "numpy", "number", "torch", "jax", "pickle", "array",
                "dtype", "shape", "impl", "device", "size", "subclass", "named", "class", "fields",
                "parts", "parameter",
            ]),
            inner,
            max_size=4,
        ),
    ),
    max_leaves=8,
)  # fmt: skip


@given(NODES)
def test_any_text_is_a_value_or_refused(node):
    try:
        values.loads(json.dumps(node), ("x",))
    except StoreError as error:
        assert "state['x']" in str(error)


@pytest.mark.parametrize(
    "text",
    [
        "",
        '{"list":' * 100_000,
        '{"numpy":{"dtype":"O","shape":[1],"bytes":"AAAAAAAAAAA="}}',
        '{"numpy":{"dtype":"f8","shape":[1099511627776],"bytes":""}}',
        '{"jax":{"dtype":"uint32","shape":[2],"bytes":"AAAAAAAAAAA=","impl":"os.system"}}',
        '{"os.system":"true"}',
    ],
)
def test_crafted_texts(text):
    with pytest.raises(StoreError, match=r"state\['x'\]"):
        values.loads(text, ("x",))
