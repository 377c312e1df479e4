"""Recording a function of values (the engine's step as recorded: tests/parity)."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

from healcore.core.recorded import NotRecordable, record


class Pair(NamedTuple):
    a: Any
    b: Any


def f32(x: float) -> np.float32:
    return np.float32(x)


def test_the_structure_comes_back():
    def swapped(tree: Any, *, xp: Any) -> Any:
        (pair, nothing, ints) = tree
        return Pair(pair.b, Pair(nothing, ints)), (pair.a + pair.b, None)

    program = record(swapped, (Pair(f32(1), f32(2)), None, (np.int32(3),)))
    results = program((Pair(f32(5), f32(7)), None, (np.int32(9),)))
    assert results == (Pair(f32(7), Pair(None, (np.int32(9),))), (f32(12), None))
    assert type(results[0]) is type(results[0].b) is Pair


def test_a_python_number_takes_the_dtype_of_the_other_side():
    def mixed(x: Any, n: Any, *, xp: Any) -> Any:
        return 0.1 * x, n + 1, xp.where(x > 0.1, 0.3, x), xp.astype(x > 0, xp.int32), (x < 0) | True

    results = record(mixed, f32(1), np.int32(1))(f32(0.1), np.int32(4))
    assert [type(each) for each in results] == [
        np.float32,
        np.int32,
        np.float32,
        np.int32,
        np.bool_,
    ]
    assert results == (f32(0.1) * f32(0.1), 5, f32(0.1), 1, True)


def test_arrays_and_what_is_on_their_left():
    def shifted(values: Any, place: Any, *, xp: Any) -> Any:
        here = xp.arange(4) == place[..., None]
        return xp.where(here, place[..., None], values)

    program = record(shifted, np.zeros(4, np.int32), np.int32(0))
    assert program(np.arange(4, dtype=np.int32), np.int32(3)).tolist() == [0, 1, 2, 3]
    assert program(np.ones(4, np.int32), np.int32(2)).tolist() == [1, 1, 2, 1]


def test_an_arm_that_is_not_taken_costs_nothing():
    def chosen(x: Any, *, xp: Any) -> Any:
        return xp.where(x > 0, xp.sqrt(x), 0.0)

    program = record(chosen, f32(4))
    assert program(f32(9)) == 3
    with np.errstate(all="raise"):
        assert program(f32(-1)) == 0  # no root is taken


def test_a_long_chain_is_no_trouble_for_the_parser():
    def chain(x: Any, *, xp: Any) -> Any:
        for _ in range(2000):
            x = xp.where(x > 10, x - 1, x + 1)
        return x

    plain = f32(0)
    for _ in range(2000):
        plain = plain - 1 if plain > 10 else plain + 1
    assert record(chain, f32(0))(f32(0)) == plain


def test_a_branch_on_a_value_is_refused():
    with pytest.raises(NotRecordable, match=r"use xp\.where"):
        record(lambda x, *, xp: 1 if x > 0 else x, f32(1))
