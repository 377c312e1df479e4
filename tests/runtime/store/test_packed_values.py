"""`PackedValues`: values come back equal, within the limit, and damage is noticed."""

import json
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from healcore.runtime.store.checkpoints import StoreError
from healcore.runtime.store.packed_values import PackedValues

PATH = ("batches",)
ARRAYS = arrays.arrays(
    st.sampled_from(["f4", "f8", ">i4", "i8", "u1", "?", "c8", "M8[s]"]),
    arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4),
)
PARTS = st.one_of(ARRAYS, st.integers(), st.text(), st.none(), st.floats())
BATCHES = st.dictionaries(st.text(), st.lists(PARTS, max_size=3) | PARTS, max_size=3)


def through_a_checkpoint(packed: PackedValues) -> dict[int, Any]:
    state = packed.state()
    return PackedValues.read({**state, "texts": json.loads(json.dumps(state["texts"]))})


@given(st.dictionaries(st.integers(0, 99), BATCHES, max_size=4))
def test_values_come_back_equal(batches):
    packed = PackedValues(1 << 30)
    for number, value in batches.items():
        assert packed.add(number, value, PATH)
        assert number in packed
    found = through_a_checkpoint(packed)
    assert repr(found) == repr(batches)


def test_arrays_of_each_framework_keep_their_kind():
    value = {
        "torch": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3).T,
        "jax": jnp.arange(3, dtype=jnp.bfloat16),
        "numpy": np.float32(2.5),
    }
    packed = PackedValues(1 << 20)
    assert packed.add(7, value, PATH)
    found = through_a_checkpoint(packed)[7]
    assert torch.equal(found["torch"], value["torch"])
    assert found["jax"].dtype == jnp.bfloat16
    assert found["jax"].tolist() == [0, 1, 2]
    assert (type(found["numpy"]), found["numpy"]) == (np.float32, 2.5)


def test_a_value_that_does_not_fit_is_left_out_and_a_smaller_one_still_fits():
    packed = PackedValues(10_000)
    assert packed.add(0, np.zeros(6_000, np.uint8), PATH)
    assert not packed.add(1, np.zeros(6_000, np.uint8), PATH)
    assert packed.add(2, np.ones(3_000, np.uint8), PATH)
    assert [*through_a_checkpoint(packed)] == [0, 2]


def test_a_value_without_a_plain_form_is_left_out_with_its_arrays():
    packed = PackedValues(10_000)
    assert not packed.add(0, [np.ones(3), object()], PATH)
    assert packed.add(1, [np.ones(3)], PATH)
    assert through_a_checkpoint(packed)[1][0].tolist() == [1, 1, 1]
    assert packed.state()["bytes"].size == 4096


def test_the_array_keeps_its_size_while_the_values_change_a_little():
    sizes = set()
    for length in (1_000, 2_000, 4_096):
        packed = PackedValues(1 << 20)
        packed.add(0, np.zeros(length, np.uint8), PATH)
        sizes.add(packed.state()["bytes"].size)
    assert sizes == {4096}


@pytest.mark.parametrize(
    "place",
    [
        pytest.param([0, 5000], id="beyond the end"),
        pytest.param([-1, 2], id="before the start"),
        pytest.param([3, 1], id="end before start"),
        pytest.param("ab", id="text"),
        pytest.param([0], id="one number"),
        pytest.param(None, id="None"),
    ],
)
def test_places_outside_of_the_array_are_refused(place):
    packed = PackedValues(10_000)
    packed.add(0, np.ones(2), PATH)
    state = packed.state()
    text = state["texts"]["0"].replace("[0,16]", json.dumps(place))
    with pytest.raises(StoreError):
        PackedValues.read({**state, "texts": {"0": text}})
