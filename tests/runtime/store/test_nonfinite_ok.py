"""Arrays that are meant to hold NaN or Inf: they can be named at any time."""

from __future__ import annotations

import pytest

from healcore.runtime.store import NotFinite
from tests.runtime.store.store_cases import ALL, over


@over(*ALL)
def test_they_can_be_named_later(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, case.with_nan())
    store.wait()
    saved = store.steps()[0]
    assert not saved.finite
    assert saved.nonfinite == ("weights.bfloat16",)
    with pytest.raises(NotFinite, match=r"weights\.bfloat16"):
        store.mark(1, "good")
    store.nonfinite_ok += ("weights.b*16",)
    assert store.steps()[0].finite
    assert store.steps()[0].nonfinite == ()
    assert store.verify(1).finite
    store.mark(1, "good")
    assert store.steps()[0].status == "good"
    store.nonfinite_ok = ()
    assert not store.steps()[0].finite


@over(*(case for case in ALL if "memory" not in case.name))
def test_they_can_be_named_after_a_restart(case, tmp_path):
    first = case.make(tmp_path)
    first.save(0, case.with_nan())
    first.wait()
    store = case.make(tmp_path, nonfinite_ok=["*.bfloat16"])
    assert store.steps()[0].finite
    store.mark(0, "good")
    # What was meant once was found all the same, and is not meant any more.
    assert not case.make(tmp_path).steps()[0].finite


@over(*ALL)
def test_nonfinite_entries_are_found_without_a_save(case, tmp_path):
    store = case.make(tmp_path)
    assert store.nonfinite_in(case.state(0)) == ()
    assert store.nonfinite_in(case.with_nan()) == ("weights.bfloat16",)
    assert store.steps() == []
    store.nonfinite_ok += store.nonfinite_in(case.with_nan())
    store.save(1, case.with_nan())
    store.save(2, case.state(0))
    store.wait()
    assert all(saved.finite for saved in store.steps())
