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


def test_a_branch_on_a_value_is_refused():
    with pytest.raises(NotRecordable, match=r"use xp\.where"):
        record(lambda x, *, xp: 1 if x > 0 else x, f32(1))
