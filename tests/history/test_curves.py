"""Thinned curves keep what stands out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.history.curves import thin


def test_short_curves_stay_whole():
    for length in (0, 80):
        curve = {"loss": np.arange(float(length))}
        assert thin(np.arange(length), curve, 100).tolist() == list(range(length))


@settings(max_examples=60)
@given(
    length=st.integers(1, 40_000),
    limit=st.integers(20, 400),
    places=st.lists(st.tuples(st.integers(0, 39_999), st.sampled_from("^v?!")), max_size=3),
)
def test_outliers_are_kept(length, limit, places):
    generator = np.random.default_rng(length)
    loss = generator.normal(size=length).astype(np.float32)
    norm = np.abs(generator.normal(size=length)).astype(np.float32)
    special = {"^": 1e6, "v": -1e6, "?": np.nan, "!": np.inf}
    for at, kind in places:
        loss[at % length] = special[kind]
    index = np.arange(length) * 3 + 5  # gaps: rows that could not be read
    at = thin(index, {"loss": loss, "norm": norm}, limit)
    kept = index[at]
    assert len(kept) <= limit
    assert len(kept) >= min(length, limit // 8)
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (index[0], index[-1])
    for curve in (loss, norm):
        finite = np.isfinite(curve)
        if finite.any():
            whole, few = curve[finite], curve[at][np.isfinite(curve[at])]
            assert (few.min(), few.max()) == (whole.min(), whole.max())
    bad = np.flatnonzero(~np.isfinite(loss))
    if len(bad):
        assert bad[0] in at
