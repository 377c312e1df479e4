"""Converts traces to series, one per attempt, and packs series to run many in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.core.engine import Engine
from healcore.plugins.rows import SignalLayout
from healcore.plugins.sweep import WORD, PackedRows, PackedSeries
from healcore.tools.replay.trace_replay import choose_layout, select_judged
from healcore.tools.traces.trace import Trace

GROUPS = 512
"""Number of groups in one call. A longer series takes 4 or 16 times as many groups, and so on."""


class Series(NamedTuple):
    """The judged rows of one attempt, after the rows of the earlier attempts that it continues."""

    trace: str
    layout: SignalLayout
    values: dict[str, np.ndarray]
    """float32 (n,) for each of the layout's signals."""
    kind: np.ndarray
    """int32 (n,): place of the row's combination in the layout."""
    index: np.ndarray
    """int64 (n,): row numbers in the trace."""
    resumed: np.ndarray
    """bool (n,): whether a resumed attempt begins at the row."""
    own: int
    """First row of the attempt itself. Rows of earlier attempts only update the state."""

    @property
    def length(self) -> int:
        """Number of rows, including rows of earlier attempts."""
        return len(self.index)

    @property
    def nonfinite(self) -> np.ndarray:
        """int64 (m,): row numbers in the trace of non-finite losses."""
        loss = self.values.get("loss")
        return self.index[:0] if loss is None else self.index[~np.isfinite(loss)]

    @property
    def groups(self) -> int:
        """Number of groups of the packed series."""
        return -(-self.length // WORD)


class RecoveryOrders(NamedTuple):
    """The recoveries that the variants order in one series, sorted by variant, then by row."""

    variant: np.ndarray
    """int64 (orders,), increasing."""
    row: np.ndarray
    """int64 (orders,): place in the series, increasing within a variant."""
    skipped: np.ndarray
    """int32 (variants,): number of skipped steps among the attempt's own rows."""
    recovered: np.ndarray
    """int32 (variants,): number of incidents with an order among the attempt's own rows."""


def series_of(trace: Trace, engine: Engine) -> list[Series]:
    """Reads a trace: one series per attempt with rows to judge. Raises TraceError."""
    survey = trace.survey()
    layout = choose_layout(engine, survey.combinations)
    if not layout.combinations:
        return []
    columns: list[dict[str, np.ndarray]] = []
    others: list[tuple[np.ndarray, ...]] = []  # kind, row number and attempt
    for chunk in trace.rows():
        values, kind, places = select_judged(layout, engine, chunk.values, chunk.logged)
        columns.append(values)
        others.append((kind, chunk.index[places], np.full(len(places), chunk.attempt)))
    values = {name: np.concatenate([each[name] for each in columns]) for name in layout.signals}
    kind, index, number = map(np.concatenate, zip(*others, strict=True))
    series = []
    lineage = np.zeros(0, np.int64)
    for attempt in survey.attempts:
        own = np.flatnonzero(number == attempt.number)
        after = -1 if attempt.resumes_after is None else attempt.resumes_after
        before = lineage[index[lineage] <= after]
        lineage = np.concatenate([before, own])
        if not len(own):
            continue
        resumed = np.zeros(len(lineage), bool)
        resumed[len(before)] = len(before) > 0
        part = {name: column[lineage] for name, column in values.items()}
        series.append(
            Series(trace.name, layout, part, kind[lineage], index[lineage], resumed, len(before))
        )
    return series


def pack(series: Sequence[Series]) -> list[PackedSeries]:
    """Packs series of the same layout together."""
    packed: list[PackedSeries] = []
    for layout in dict.fromkeys(each.layout for each in series):
        batch: list[int] = []
        for i in (i for i, each in enumerate(series) if each.layout == layout):
            if batch and sum(series[j].groups for j in (*batch, i)) > GROUPS:
                packed.append(_pack_batch(series, batch))
                batch = []
            batch.append(i)
        packed.append(_pack_batch(series, batch))
    return packed


def unpack(
    series: Sequence[Series],
    packed: PackedSeries,
    words: np.ndarray,
    skipped: np.ndarray,
    recovered: np.ndarray,
) -> list[RecoveryOrders]:
    """Returns the orders of each packed series from the three arrays of `SweepScan.run`."""
    unpacked = []
    ends = (*packed.first_groups[1:], len(words))
    for which, start, end in zip(packed.indices, packed.first_groups, ends, strict=True):
        group, variant = np.nonzero(words[start:end])
        bits = (words[start:end][group, variant][:, None] >> np.arange(WORD, dtype=np.uint32)) & 1
        order, bit = np.nonzero(bits)
        row, variant = group[order] * WORD + bit, variant[order]
        own = row >= series[which].own
        row, variant = row[own], variant[own]
        by_variant = np.lexsort((row, variant))
        unpacked.append(
            RecoveryOrders(
                variant[by_variant],
                row[by_variant],
                skipped[start:end].sum(axis=0, dtype=np.int32),
                recovered[start:end].sum(axis=0, dtype=np.int32),
            )
        )
    return unpacked


def _pack_batch(series: Sequence[Series], which: Sequence[int]) -> PackedSeries:
    """Packs series, padded to one of a few lengths, because each length needs a compilation."""
    layout = series[which[0]].layout
    needed = sum(series[i].groups for i in which)
    count = GROUPS
    while count < needed:
        count *= 4
    rows = PackedRows(
        signals=np.zeros((count * WORD, len(layout.signals)), np.float32),
        kind=np.zeros(count * WORD, np.int32),
        resumed=np.zeros(count * WORD, bool),
        own=np.zeros(count * WORD, bool),
        start=np.zeros(count, np.int32),
        stop=np.zeros(count, np.int32),
        fresh=np.zeros(count, bool),
    )
    first, group = [], 0
    for each in (series[i] for i in which):
        start, stop = group * WORD, group * WORD + each.length
        for place, name in enumerate(layout.signals):
            rows.signals[start:stop, place] = each.values[name]
        rows.kind[start:stop] = each.kind
        rows.resumed[start:stop] = each.resumed
        rows.own[start + each.own : stop] = True
        end = group + each.groups
        rows.start[group:end] = np.arange(group, end) * WORD
        rows.stop[group:end] = np.minimum(rows.start[group:end] + WORD, stop)
        rows.fresh[group] = True
        first.append(group)
        group = end
    return PackedSeries(layout, rows, tuple(which), tuple(first))
