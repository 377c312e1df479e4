"""Thinned curves keep what stands out."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from healcore.history.curves import Envelope


def test_short_curves_stay_whole():
    envelope = Envelope(100)
    envelope.add(np.arange(60), {"loss": np.arange(60.0)})
    envelope.add(np.arange(60, 80), {"loss": np.arange(60.0, 80), "norm": np.ones(20)})
    index, values = envelope.thinned()
    assert index.tolist() == list(range(80))
    assert values["loss"].tolist() == list(range(80))
    assert np.isnan(values["norm"][:60]).all()
    assert (values["norm"][60:] == 1).all()


def test_nothing_in_nothing_out():
    envelope = Envelope()
    envelope.add(np.empty(0, np.int64), {"loss": np.empty(0)})
    index, values = envelope.thinned()
    assert (len(index), values) == (0, {})


@settings(max_examples=60)
@given(
    length=st.integers(1, 40_000),
    limit=st.integers(20, 400),
    cut=st.integers(1, 9_000),
    places=st.lists(st.tuples(st.integers(0, 39_999), st.sampled_from("^v?!")), max_size=3),
)
def test_outliers_are_kept(length, limit, cut, places):
    generator = np.random.default_rng(length)
    loss = generator.normal(size=length).astype(np.float32)
    norm = np.abs(generator.normal(size=length)).astype(np.float32)
    special = {"^": 1e6, "v": -1e6, "?": np.nan, "!": np.inf}
    for at, kind in places:
        loss[at % length] = special[kind]
    index = np.arange(length) * 3 + 5  # gaps: rows that could not be read
    envelope = Envelope(limit)
    for low in range(0, length, cut):
        part = slice(low, low + cut)
        envelope.add(index[part], {"loss": loss[part], "norm": norm[part]})
    kept, values = envelope.thinned()
    assert len(kept) <= limit
    assert len(kept) >= min(length, limit // 8)
    assert (np.diff(kept) > 0).all()
    assert (kept[0], kept[-1]) == (index[0], index[-1])
    at = np.searchsorted(index, kept)
    np.testing.assert_array_equal(values["loss"], loss[at])
    np.testing.assert_array_equal(values["norm"], norm[at])
    for curve in (loss, norm):
        finite = np.isfinite(curve)
        if finite.any():
            whole, thin = curve[finite], curve[at][np.isfinite(curve[at])]
            assert (thin.min(), thin.max()) == (whole.min(), whole.max())
    bad = np.flatnonzero(~np.isfinite(loss))
    if len(bad):
        assert bad[0] in at
