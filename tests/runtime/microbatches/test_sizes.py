"""The size that fits is found in few steps, kept, and tried again a bounded number of times."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from healcore.runtime.microbatches.sizes import CannotShrink, MicrobatchSizes
from healcore.runtime.microbatches.splitting import BatchSize, measure, split


def sizes(shrinks: int = 100, grow_after: int = 10) -> MicrobatchSizes:
    return MicrobatchSizes(shrinks=shrinks, grow_after=grow_after)


def batch(samples: int, length: int = 1) -> BatchSize:
    return BatchSize(samples, samples * length, "x:2")


@given(samples=st.integers(1, 300), fits=st.integers(1, 300), length=st.integers(1, 50))
def test_shrinking_ends_at_a_size_that_fits(samples, fits, length):
    """At most log2(samples) failures, and the size is more than half of what fits."""
    book, size, failures = sizes(), batch(samples, length), 0
    while -(-samples // (parts := book.parts(size))) > fits:
        book.shrink(size, parts, step=0)
        failures += 1
    largest = -(-samples // parts)
    assert failures == book.used <= np.ceil(np.log2(samples))
    assert min(samples, fits) / 2 <= largest <= fits


@given(samples=st.integers(1, 300))
def test_few_shapes(samples):
    """A step that is compiled for each shape sees two for each halving."""
    book, size, shapes = sizes(), batch(samples), set()
    while True:
        parts = book.parts(size)
        shapes |= {len(piece) for piece in split(np.zeros(samples), parts)}
        try:
            book.shrink(size, parts, step=0)
        except CannotShrink:
            break
    assert len(shapes) <= 2 * np.ceil(np.log2(samples)) + 1


def test_short_sequences_are_split_less():
    book = sizes()
    book.shrink(batch(8, 1024), 1, step=0)
    assert book.parts(batch(8, 1024)) == 2
    assert book.parts(batch(8, 512)) == 1
    assert book.parts(batch(8, 4096)) == 8
    assert book.parts(BatchSize(64, 10**9, "other:4")) == 1, "another kind has its own limit"


def test_nothing_is_measured_before_something_did_not_fit():
    book = sizes()
    assert not book.limited
    book.shrink(batch(8), 1, step=0)
    assert book.limited


@pytest.mark.parametrize(("most", "parts"), [(8, 1), (4, 2), (3, 4), (1, 8), (100, 1)])
def test_at_most_so_many_samples(most, parts):
    assert sizes().parts(batch(8), most) == parts


def test_a_single_sample_cannot_shrink():
    book = sizes()
    with pytest.raises(CannotShrink, match="a single sample does not fit"):
        book.shrink(batch(8), 8, step=0)
    assert book.to_dict() == sizes().to_dict()


def test_the_budget():
    book = sizes(shrinks=2)
    book.shrink(batch(8), 1, step=0)
    book.shrink(batch(8), 2, step=0)
    before = book.to_dict()
    with pytest.raises(CannotShrink, match=r"2 samples do not fit .* permits it 2 times"):
        book.shrink(batch(8), 4, step=0)
    assert book.to_dict() == before


def test_growth_waits_longer_after_each_failure_and_ends():
    """Memory that never suffices for eight: three tries in ten thousand steps."""
    book, tries = sizes(shrinks=1), []
    book.shrink(batch(8), 1, step=0)
    for step in range(10_000):
        if book.grow(batch(8), step):
            tries.append(step)
            book.shrink(batch(8), book.parts(batch(8)), step)  # uses no budget: it undoes a growth
    assert tries == [10, 30, 70]
    assert book.used == 1
    assert book.parts(batch(8)) == 2


def test_growth_back_to_the_whole_batch():
    book = sizes()
    for parts in (1, 2, 4):
        book.shrink(batch(8), parts, step=0)
    grown = [
        (step, resize.before, resize.after)
        for step in range(100)
        if (resize := book.grow(batch(8), step))
    ]
    assert grown == [(10, 1, 2), (20, 2, 4), (30, 4, 8)]
    assert book.parts(batch(8)) == 1


def test_saved_and_loaded():
    book = sizes()
    book.shrink(measure({"x": np.zeros((8, 3))}), 1, step=5)
    other = sizes()
    other.load(json.loads(json.dumps(book.to_dict())))
    assert other.to_dict() == book.to_dict()
    assert other.parts(measure({"x": np.zeros((8, 3))})) == 2
