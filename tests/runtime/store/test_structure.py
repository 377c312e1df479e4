"""Nested Python values as JSON and back."""

from __future__ import annotations

import json
import math
from collections import Counter, OrderedDict, deque
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.store import UnsavableState, structure

KEYS = st.one_of(st.text(max_size=3), st.integers(), st.booleans(), st.none(), st.floats(-9, 9))
VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
        st.complex_numbers(allow_nan=False),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
        st.lists(inner, max_size=3).map(lambda parts: deque(parts, maxlen=5)),
    ),
    max_leaves=8,
)  # fmt: skip


class Pair(NamedTuple):
    left: Any
    right: Any


def unknown(path: Any, value: Any) -> None:
    return None


def back(value: Any, like: Any = None) -> Any:
    node = json.loads(structure.dumps(structure.encode(value, (), unknown)))
    return structure.decode(node, unknown, like)


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return math.copysign(1, a) == math.copysign(1, b) and (a == b or (a != a and b != b))
    if isinstance(a, deque) and isinstance(b, deque) and a.maxlen != b.maxlen:
        return False
    if isinstance(a, (list, tuple, deque)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        keys = [(type(key), key) for key in a] == [(type(key), key) for key in b]
        return keys and type(a) is type(b) and all(same(a[key], b[key]) for key in a)
    return type(a) is type(b) and a == b


@given(VALUES)
def test_any_value_comes_back(value):
    assert same(value, back(value))


@pytest.mark.parametrize(
    "value", [{1, "a"}, frozenset({(1, 2)}), range(3, 9, 2), bytearray(b"\0x"), deque(), set()]
)
def test_other_containers_of_the_standard_library(value):
    assert same(value, back(value))


@pytest.mark.parametrize(
    "value",
    [
        list(range(-5, 5000)),
        [2**63 - 1, -(2**63)] * 600,
        [2**63] * 1200,
        [True, 0] * 600,
        [1.0] * 1200,
    ],
)
def test_long_lists(value):
    assert same(value, back(value))


def test_subclasses_are_no_base_class_if_exact():
    class Special(dict):
        pass

    for value in (Pair(1, 2), Special(a=1)):
        with pytest.raises(UnsavableState, match=type(value).__name__):
            structure.encode({"x": value}, (), unknown, exact=True)
        structure.encode({"x": value}, (), unknown)


def test_kinds_of_dictionaries():
    ordered = OrderedDict([("b", 1), ("a", OrderedDict())])
    assert same(ordered, back(ordered))
    assert same(Counter("abca"), back(Counter("abca")))


def test_a_tuple_gets_its_name_from_the_live_one():
    assert back({"pair": Pair(1, [2])}) == {"pair": (1, [2])}
    found = back({"pair": Pair(1, Pair(2, 3))}, {"pair": Pair(0, Pair(0, 0))})
    assert found == {"pair": Pair(1, Pair(2, 3))}
    assert type(found["pair"].right) is Pair
    assert back((1, 2), Pair(0, 0)) == (1, 2)


def test_the_versions_of_modules_are_kept():
    value = OrderedDict(weight=1)
    value._metadata = OrderedDict({"": {"version": 2}})  # type: ignore[attr-defined]
    assert back(value)._metadata == {"": {"version": 2}}


def test_an_unsavable_value_is_named():
    with pytest.raises(UnsavableState, match=r"state\['a'\]\[1\] is a builtins.object"):
        structure.encode({"a": [1, object()]}, (), unknown)
    with pytest.raises(UnsavableState, match="keys are strings, numbers or tuples"):
        structure.encode({"a": {frozenset(): 1}}, (), unknown)


def test_an_enum_is_no_number():
    import enum

    class Color(enum.IntEnum):
        RED = 1

    with pytest.raises(UnsavableState, match="Color"):
        structure.encode(Color.RED, (), unknown)


def test_names_of_arrays_are_unique():
    names = structure.Names()
    found = [names.at(path) for path in (("a", "b"), ("a.b",), ("a", "b#2"), ("a.b",))]
    assert found[0] == "a.b"
    assert len(set(found)) == 4
