"""Nested Python values as JSON and back."""

from __future__ import annotations

import json
import time
from collections import Counter, OrderedDict, defaultdict, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import StoreError, UnsavableState, values
from tests.runtime.store.store_cases import same

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(-9, 9))
PLAIN = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
    st.complex_numbers(allow_nan=False),
)  # fmt: skip
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda parts: deque(parts, maxlen=5)),
    ),
    max_leaves=8,
)


class Pair(NamedTuple):
    left: Any
    right: Any


def unknown(path: Any, value: Any) -> None:
    return None


def back(value: Any) -> Any:
    node = json.loads(values.to_json(values.encode(value, (), unknown)))
    return values.decode(node, unknown)


@given(VALUES)
def test_any_value_comes_back(value):
    assert same(value, back(value))
    assert repr(value) == repr(back(value)), "in the same order"


FACTORIES = (None, int, list, dict, set, str, float, tuple)


@pytest.mark.parametrize(
    "value",
    [
        {1, "a"}, frozenset({(1, 2)}), range(3, 9, 2), bytearray(b"\0x"), deque(), set(),
        OrderedDict([("b", 1), ("a", OrderedDict())]), Counter("abca"),
        {"pair": Pair(1, [Pair(2, (3,))]), Pair(0, 1): 2},
        [defaultdict(factory, {"a": defaultdict(int, b=2)}) for factory in FACTORIES],
    ],
)  # fmt: skip
def test_other_types_of_the_standard_library(value):
    assert same(value, back(value))


class Special(dict):
    pass


class Counter2(Counter):
    """Its name differs from the standard library's."""


Counter2.__name__ = "Counter"
Row = type("Row", (list,), {})
Text = type("Text", (str,), {})


@pytest.mark.parametrize(
    "value",
    [
        Special(a=1), Counter2("ab"), Row([1]), Text("a"), time.localtime(0),
        defaultdict(lambda: 1), {"key": {Text("a"): 1}}, {Pair(1, 2): 1}.keys(),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_a_type_that_would_be_lost_is_refused_with_its_place(value: Any):
    with pytest.raises(UnsavableState, match=r"state\['x'\]\['y'\]"):
        values.encode({"x": {"y": value}}, (), unknown)


def test_a_named_tuple_of_a_module_that_is_not_imported():
    node = values.encode(Pair(1, 2), (), unknown)
    node["named"]["class"] = "gone.Pair"
    with pytest.raises(StoreError, match=r"gone\.Pair"):
        values.decode(node, unknown)
