"""States of loaders and generators as text: they round-trip, and nothing in them is called."""

import json
from collections import OrderedDict
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import StoreError, UnsavableState, values
from tests.hostile.run_directories import base64_of, code

ARRAYS = [
    np.arange(6, dtype=np.uint16).reshape(2, 3),
    np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    np.array(3.5, ">f4"),
    np.zeros((0, 4), np.int8),
    np.array(["ab", "c"]),
    np.array(["2026-01-01"], "M8[D]"),
    np.array([1.5, np.nan], ml_dtypes.bfloat16),
]


def back(value: Any, **options: Any) -> Any:
    return values.loads(values.dumps(value, ("x",), **options), ("x",), **options)


def test_arrays_of_numpy():
    for array, found in zip(ARRAYS, back({"a": ARRAYS})["a"], strict=True):
        assert (found.dtype, found.shape) == (array.dtype, array.shape)
        assert found.tobytes() == array.tobytes()
        assert found.flags.writeable


def test_random_generators():
    old, old_again = np.random.RandomState(4), np.random.RandomState()
    old.normal(size=3)
    old_again.set_state(back(old.get_state()))
    assert (old_again.normal(size=700) == old.normal(size=700)).all()
    new, drawn = np.random.default_rng(5), np.random.default_rng()
    new.random(3)
    drawn.bit_generator.state = back(new.bit_generator.state)
    assert (drawn.random(9) == new.random(9)).all()
    key = jax.random.key(7)
    found = back({"key": key, "array": jax.numpy.arange(3, dtype="bfloat16")})
    assert (jax.random.key_data(found["key"]) == jax.random.key_data(key)).all()
    assert jax.random.key_impl(found["key"]) == jax.random.key_impl(key)
    assert found["array"].dtype == "bfloat16"


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
        assert type(found[name]) is type(each)
        if isinstance(each, torch.Tensor):
            assert torch.equal(found[name], each.detach())
            for part in ("dtype", "requires_grad"):
                assert getattr(found[name], part) == getattr(each, part)
        else:
            assert found[name] == each


@pytest.mark.parametrize(
    "value",
    [np.array([{}], object), torch.eye(2).to_sparse(), OrderedDict],
    ids=["array of objects", "sparse", "class"],
)
def test_without_a_plain_form(value):
    with pytest.raises(UnsavableState, match=r"state\['x'\]\['at'\]\[1\]"):
        values.dumps({"at": [0, value]}, ("x",))


KEYS = [
    "dict", "type", "versions", "list", "tuple", "deque", "maxlen", "set", "range", "bytes",
    "float", "complex", "numpy", "number", "torch", "jax", "pickle", "array", "dtype", "shape",
    "impl", "device", "size", "subclass", "named", "class", "fields", "parts", "parameter",
]  # fmt: skip
NODES = st.recursive(
    st.one_of(st.none(), st.integers(), st.text(max_size=5), st.just(base64_of(b"abcd"))),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(KEYS), inner, max_size=4)
    ),
    max_leaves=8,
)


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
        '{"pickle":"CODE"}',
        '{"subclass":{"made":"CODE","shape":[2],"stride":[1],"parts":[]}}',
    ],
)
def test_crafted_texts(text, tmp_path):
    ran = tmp_path / "ran"
    with pytest.raises(StoreError, match=r"state\['x'\]"):
        values.loads(text.replace("CODE", base64_of(code(ran))), ("x",))
    assert not ran.exists()
