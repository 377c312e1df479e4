"""Batches of every structure are split, put together again, and refused in words."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from healcore.runtime.faults.microbatches import UnsplittableBatch, count_samples, split


class Pair(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True)
class Record:
    x: Any
    name: str = "a"


def rows(n: int, *more: int) -> torch.Tensor:
    return torch.arange(n * int(np.prod(more))).reshape(n, *more)


@given(n=st.integers(1, 40), data=st.data(), framework=st.sampled_from([np, jnp, torch]))
def test_parts_put_together_are_the_batch(n, data, framework):
    parts = data.draw(st.integers(1, n))
    x = framework.arange(3 * n).reshape(n, 3)
    pieces = split({"x": x, "names": [str(i) for i in range(n)], "scale": 2.0}, parts)
    lengths = {len(piece["names"]) for piece in pieces}
    assert len(pieces) == parts
    assert max(lengths) - min(lengths) <= 1
    assert np.array_equal(np.concatenate([np.asarray(piece["x"]) for piece in pieces]), x)
    assert [name for piece in pieces for name in piece["names"]] == [str(i) for i in range(n)]
    assert {piece["scale"] for piece in pieces} == {2.0}
    assert {type(piece["x"]) for piece in pieces} == {type(x)}


@pytest.mark.parametrize(
    "batch",
    [
        pytest.param(rows(4, 2), id="tensor"),
        pytest.param([{"a": rows(4)}, rows(4)], id="list of a dictionary"),
        pytest.param(Pair(rows(4, 2), rows(4)), id="named tuple"),
        pytest.param(
            {"x": [rows(4), rows(4, 5)], "lr": torch.tensor(0.1), "n": None},
            id="numbers beside tensors",
        ),
        pytest.param(
            BatchEncoding({"input_ids": rows(4, 7), "labels": rows(4, 7)}), id="BatchEncoding"
        ),
        pytest.param(
            [{"x": rows(3)}, {"x": rows(3)}, {"x": rows(3)}, {"x": rows(3)}],
            id="list of samples, not split along 3",
        ),
        pytest.param([rows(5), rows(7), rows(2), rows(9)], id="tensors of other lengths"),
        pytest.param([Record(rows(3))] * 4, id="dataclasses"),
        pytest.param(
            {"image": rows(4, 3, 2, 2), "boxes": [rows(2, 4), rows(1, 4), rows(5, 4), rows(3, 4)]},
            id="images with boxes",
        ),
        pytest.param(
            {"text": ["a", "b", "c", "d"], "label": [0, 1, 0, 1]}, id="lists of texts and labels"
        ),
    ],
)
def test_the_parts_of_a_batch_keep_its_structure(batch):
    assert count_samples(batch) == 4
    pieces = split(batch, 2)
    assert [count_samples(piece) for piece in pieces] == [2, 2]
    assert {type(piece) for piece in pieces} == {type(batch)}


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ({"x": rows(4), "y": rows(5)}, r"lengths \[4, 5\]"),
        (7, r"7 of type int has the lengths \[\]"),
    ],
)
def test_a_batch_without_a_common_length_is_refused(batch, message):
    for refuse in (count_samples, lambda batch: split(batch, 2)):
        with pytest.raises(UnsplittableBatch, match=message):
            refuse(batch)
