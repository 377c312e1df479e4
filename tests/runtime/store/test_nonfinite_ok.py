"""Arrays that are meant to hold NaN or Inf: they can be named at any time."""

from __future__ import annotations

from tests.runtime.store.store_cases import ALL, DISKS, TIERS, over


@over(*DISKS, *TIERS)  # memory keeps no such copy
def test_they_can_be_named_later(case, tmp_path):
    store = case.make(tmp_path)
    store.save(1, case.with_nan(), healing={"attempts": [0], "proven": 9})
    store.wait()
    saved = store.steps()[0]
    assert saved.status == "candidate"
    assert not saved.finite
    assert saved.nonfinite == ("weights.bfloat16",)
    store.nonfinite_ok += ("weights.b*16",)
    assert store.steps()[0].finite
    assert store.steps()[0].nonfinite == ()
    assert store.verify(1).finite
    assert store.steps()[0].status == "good"
    store.nonfinite_ok = ()
    assert not store.steps()[0].finite


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
