"""Turns traces into series, one for each attempt, and packs series to run many in one call."""

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
"""Groups packed together. A longer series takes 4 times as many, or 16 times, and so on."""


class Series(NamedTuple):
    """The rows of one attempt that an engine judges, after the rows of its lineage."""

    trace: str
    layout: SignalLayout
    values: dict[str, np.ndarray]
    """float32 (n,) for each of the layout's signals."""
    kind: np.ndarray
    """int32 (n,): which of the layout's combinations the row has."""
    index: np.ndarray
    """int64 (n,): their rows in the trace."""
    resumed: np.ndarray
    """bool (n,): the first row after the checkpoint that a resumed attempt continues from."""
    own: int
    """Rows before this one are of earlier attempts: judged for the state only, and not counted."""

    @property
    def length(self) -> int:
        """Rows, including the rows of its lineage."""
        return len(self.index)

    @property
    def bad(self) -> np.ndarray:
        """int64 (m,): rows of the trace whose loss is not finite."""
        loss = self.values.get("loss")
        return self.index[:0] if loss is None else self.index[~np.isfinite(loss)]

    @property
    def groups(self) -> int:
        """Groups that it takes when it is packed."""
        return -(-self.length // WORD)


class RecoveryOrders(NamedTuple):
    """The recoveries that the variants ordered over one series, by variant, then by row."""

    variant: np.ndarray
    """int64 (orders,), increasing."""
    row: np.ndarray
    """int64 (orders,): place in the series; increasing within one variant."""
    skipped: np.ndarray
    """int32 (variants,): steps skipped, of the series' own rows."""
    recovered: np.ndarray
    """int32 (variants,): orders that are the first of their incident, of the series' own rows."""


def series_of(trace: Trace, engine: Engine) -> list[Series]:
    """Reads a whole trace, or raises TraceError; one series per attempt that has rows to judge."""
    survey = trace.survey()
    layout = choose_layout(engine, survey.combinations)
    if not layout.combinations:
        return []
    columns: list[dict[str, np.ndarray]] = []
    others: list[tuple[np.ndarray, ...]] = []
    for chunk in trace.rows():
        values, kind, places = select_judged(layout, engine, chunk.values, chunk.logged)
        columns.append(values)
        others.append((kind, chunk.index[places], np.full(len(places), chunk.attempt)))
    values = {name: np.concatenate([each[name] for each in columns]) for name in layout.signals}
    kind, index, number = map(np.concatenate, zip(*others, strict=True))
    found = []
    lineage = np.zeros(0, np.int64)
    for attempt in survey.attempts:
        mine = np.flatnonzero(number == attempt.number)
        after = -1 if attempt.resumes_after is None else attempt.resumes_after
        before = lineage[index[lineage] <= after]
        lineage = np.concatenate([before, mine])
        if not len(mine):
            continue
        resumed = np.zeros(len(lineage), bool)
        resumed[len(before)] = len(before) > 0
        mine = {name: column[lineage] for name, column in values.items()}
        found.append(
            Series(trace.name, layout, mine, kind[lineage], index[lineage], resumed, len(before))
        )
    return found


def pack(series: Sequence[Series]) -> list[PackedSeries]:
    """Packs every series with others of its layout."""
    packed: list[PackedSeries] = []
    for layout in dict.fromkeys(each.layout for each in series):
        batch: list[int] = []
        for i in (i for i, each in enumerate(series) if each.layout == layout):
            if batch and sum(series[j].groups for j in (*batch, i)) > GROUPS:
                packed.append(_packed(series, batch))
                batch = []
            batch.append(i)
        packed.append(_packed(series, batch))
    return packed


def unpack(
    series: Sequence[Series],
    packed: PackedSeries,
    words: np.ndarray,
    skipped: np.ndarray,
    recovered: np.ndarray,
) -> list[RecoveryOrders]:
    """The orders over each packed series, from the three arrays that `SweepScan.run` returns."""
    found = []
    ends = (*packed.first[1:], len(words))
    for which, start, end in zip(packed.which, packed.first, ends, strict=True):
        group, variant = np.nonzero(words[start:end])
        bits = (words[start:end][group, variant][:, None] >> np.arange(WORD, dtype=np.uint32)) & 1
        order, bit = np.nonzero(bits)
        row, variant = group[order] * WORD + bit, variant[order]
        own = row >= series[which].own
        row, variant = row[own], variant[own]
        by_variant = np.lexsort((row, variant))
        found.append(
            RecoveryOrders(
                variant[by_variant],
                row[by_variant],
                skipped[start:end].sum(axis=0, dtype=np.int32),
                recovered[start:end].sum(axis=0, dtype=np.int32),
            )
        )
    return found


def _packed(series: Sequence[Series], which: Sequence[int]) -> PackedSeries:
    """Pads to one of a few lengths, since each length is a compiled program."""
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
