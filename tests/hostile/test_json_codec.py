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

from healcore.runtime.store import values
from healcore.runtime.store.checkpoints import StoreError, UnsavableState
from tests.hostile.run_directories import base64_of, code
from tests.runtime.store.store_cases import same

VALUES: dict[str, Any] = {
    "of NumPy": [
        np.arange(6, dtype=np.uint16).reshape(2, 3),
        np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        np.array(3.5, ">f4"),
        np.zeros((0, 4), np.int8),
        np.array(["ab", "c"]),
        np.array(["2026-01-01"], "M8[D]"),
        np.array([1.5, np.nan], ml_dtypes.bfloat16),
    ],
    "of its generators": [
        np.random.RandomState(4).get_state(),
        np.random.default_rng(5).bit_generator.state,
    ],
    "of JAX": [jax.random.key(7), jax.numpy.arange(3, dtype="bfloat16")],
    "of torch": [
        torch.Generator().manual_seed(3).get_state(),
        torch.arange(4.0)[::2],
        torch.tensor(True),
        torch.zeros(0, 3),
        torch.float8_e4m3fn,
        torch.device("cpu"),
    ],
}


def back(value: Any, **options: Any) -> Any:
    return values.loads(values.dumps(value, ("x",), **options), ("x",), **options)


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_bit_for_bit(name):
    for value, found in zip(VALUES[name], back({"a": VALUES[name]})["a"], strict=True):
        assert same(value, found)
        assert getattr(found, "requires_grad", None) == getattr(value, "requires_grad", None)
        assert not isinstance(found, np.ndarray) or found.flags.writeable


@pytest.mark.parametrize(
    "value",
    [np.array([{}], object), torch.eye(2).to_sparse(), OrderedDict],
    ids=["array of objects", "sparse", "class"],
)
def test_a_value_without_a_plain_form_is_named_by_its_path(value):
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
def test_a_crafted_text_is_refused_and_runs_nothing(text, tmp_path):
    ran = tmp_path / "ran"
    with pytest.raises(StoreError, match=r"state\['x'\]"):
        values.loads(text.replace("CODE", base64_of(code(ran))), ("x",))
    assert not ran.exists()
