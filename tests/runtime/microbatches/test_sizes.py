"""The size that fits is found in few steps, and kept."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes


def sizes(shrinks: int = 100) -> MicrobatchSizes:
    return MicrobatchSizes(shrinks=shrinks)


@given(samples=st.integers(1, 300), fits=st.integers(1, 300))
def test_shrinking_ends_at_a_size_that_fits(samples, fits):
    """At most log2(samples) failures, and the size is more than half of what fits."""
    book, failures = sizes(), 0
    while -(-samples // (parts := book.parts(samples))) > fits:
        book.shrink(samples, parts)
        failures += 1
    largest = -(-samples // parts)
    assert failures == book.used <= np.ceil(np.log2(samples))
    assert min(samples, fits) / 2 <= largest <= fits


def test_the_limit_holds_for_other_batches():
    book = sizes()
    book.shrink(8, 1)
    assert [book.parts(samples) for samples in (4, 8, 32)] == [1, 2, 8]
    assert book.parts(8, most=2) == 4


def test_a_single_sample_cannot_shrink():
    book = sizes()
    with pytest.raises(CannotShrink, match="a single sample"):
        book.shrink(8, 8)
    assert book.to_dict() == sizes().to_dict()


def test_the_budget():
    book = sizes(shrinks=2)
    book.shrink(8, 1)
    book.shrink(8, 2)
    before = book.to_dict()
    with pytest.raises(CannotShrink, match=r"permits it 2 times"):
        book.shrink(8, 4)
    assert book.to_dict() == before


def test_saved_and_loaded():
    book, other = sizes(), sizes()
    book.shrink(8, 1)
    other.load(json.loads(json.dumps(book.to_dict())))
    assert other.to_dict() == book.to_dict()
    assert other.parts(8) == 2
