"""Counts of thousands of variants add up by hand, and as each variant alone."""

from __future__ import annotations

import math

import numpy as np
import pytest

from healcore.core.signals import Signals
from healcore.tools.replay.scores import Label, Zone
from healcore.tools.sweep.scores import Costs, count_orders, latency, own_events, rates, score
from healcore.tools.sweep.series import RecoveryOrders, pack, unpack
from tests.tools.sweep import sample_series

ROWS = 900


def series(bad: tuple[int, ...] = ()):
    loss = np.ones(ROWS, np.float32)
    loss[list(bad)] = np.nan
    return sample_series.series_of(Signals(loss=loss), (("loss",),), np.zeros(ROWS))


def counted(
    rows: list[list[int]], label: Label, bad: tuple[int, ...] = (), repeats=0, **costs: int
):
    """The counts of variants that order at these rows."""
    variant = np.repeat(np.arange(len(rows)), [len(each) for each in rows])
    at, none = (
        np.concatenate([sorted(each) for each in rows]).astype(int),
        np.zeros(len(rows), np.int32),
    )
    recovered = np.array([len(each) - repeats for each in rows], np.int32)
    orders = RecoveryOrders(variant, at, none, recovered)
    each = series(bad)
    return count_orders(each, own_events(each, label), orders, Costs(**costs))


def test_by_hand():
    label = Label("x", ROWS, (Zone(200, 230), Zone(600, 610)), (Zone(400, 410),))
    rows = [
        [197, 604],  # both, the first before its onset
        [211, 651],  # the first late, the second just too late: false
        [70, 100, 300, 405, 63],  # false twice: 70 and 100 are one; 405 ambiguous, 63 too early
        [],
    ]
    got = counted(rows, label, recovery=10)
    assert (got.events, got.rows) == (2, ROWS)
    assert got.in_time.tolist() == [2, 0, 0, 0]
    assert (got.delay >= 0).sum(axis=1).tolist() == [2, 1, 0, 0]
    assert got.delay.tolist() == [[0, 4], [11, -1], [-1, -1], [-1, -1]]
    assert got.false.tolist() == [0, 1, 2, 0]
    # Recoveries at ten steps each, then the rows until the order, or all 31 and 11 of them.
    assert got.lost.tolist() == [20 + 0 + 4, 20 + 11 + 11, 50 + 42, 42]


def test_many_variants_as_each_alone():
    rng = np.random.default_rng(0)
    for _ in range(20):
        spikes = tuple(Zone(int(a), int(a + rng.integers(1, 60))) for a in rng.integers(0, ROWS, 4))
        vague = tuple(Zone(int(a), int(a + rng.integers(1, 60))) for a in rng.integers(0, ROWS, 2))
        label = Label("x", ROWS, spikes, vague)
        bad = tuple(rng.integers(0, ROWS, 3).tolist())
        rows = [np.unique(rng.integers(0, ROWS, rng.integers(0, 30))).tolist() for _ in range(8)]
        together = counted(rows, label, bad)
        assert together.events == 4
        for i, each in enumerate(rows):
            alone = counted([each], label, bad)
            for name in ("in_time", "delay", "false", "lost"):
                assert getattr(together, name)[i].tolist() == getattr(alone, name)[0].tolist()


def test_rows_of_an_earlier_attempt_do_not_count():
    each = series()._replace(own=300)
    label = Label("x", ROWS, (Zone(100, 120), Zone(500, 520)), ())
    assert [zone.onset for zone in own_events(each, label).spikes] == [500], (
        "the first is the earlier attempt's"
    )


def test_packed_bits():
    rng = np.random.default_rng(1)
    due = rng.random((96, 5)) < 0.1
    packed_orders = np.zeros((3, 5), np.uint32)
    for row, variant in np.argwhere(due):
        packed_orders[row // 32, variant] |= np.uint32(1) << np.uint32(row % 32)
    signals = Signals(loss=due[:, 0])
    each = sample_series.series_of(signals, (("loss",),), np.zeros(96))._replace(own=40)
    (packed,) = pack([each])
    (orders,) = unpack([each], packed, packed_orders, *np.zeros((2, 3, 5), np.int32))
    expected = [(v, r) for v in range(5) for r in range(40, 96) if due[r, v]]
    assert list(zip(orders.variant.tolist(), orders.row.tolist(), strict=True)) == expected


def test_the_objectives():
    label = Label("x", ROWS, (Zone(200, 230),), ())
    both = rates([counted([[205], [205, 500], []], label)])
    assert both.recall.tolist() == [1.0, 1.0, 0.0]
    assert both.false == pytest.approx([0.0, 10_000 / ROWS, 0.0])
    assert math.isnan(latency([counted([[205], [205, 500], []], label)], 2))
    assert score(both, "balance", 0.1) == pytest.approx([1.0, 1.0 - 1000 / ROWS, 0.0])
    assert score(both, "recall", 0.1).argsort().tolist() == [2, 1, 0]
    assert score(both, "false", 0.1).argsort().tolist() == [1, 2, 0]
    assert score(both, "lost", 0.1).argsort().tolist() == [1, 0, 2], "a spike of 31 rows, let be"
    healthy = rates([counted([[], [500]], Label("x", ROWS, (), ()))])
    assert healthy.events == 0
    assert np.isnan(healthy.recall).all(), "nothing to find is not all of it found"
    assert np.isfinite(score(healthy, "balance", 0.1)).all()


def test_latency_is_the_median_as_in_a_replay():
    label = Label("x", ROWS, (Zone(200, 230), Zone(400, 430), Zone(600, 630)), ())
    tallies = [counted([[200, 402, 630]], label), counted([[205]], label)]
    assert latency(tallies[:1], 0) == 2
    assert latency(tallies, 0) == 3.5, "of all events, not the mean of medians"


def test_an_order_repeated_within_its_incident_costs_nothing():
    label = Label("x", ROWS, (Zone(200, 230),), ())
    once = counted([[210, 260]], label, repeats=1, recovery=10)
    assert once.lost.tolist() == [10 + 10]
    assert once.false.tolist() == counted([[210, 260]], label).false.tolist(), "as a replay has it"
