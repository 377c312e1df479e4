"""Series spliced one after another, so that one call of a compiled program runs many.

A reel is cut into groups of 32 rows: one word of bits holds the orders of a group. A series begins
a new group, and with it a new state.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.tools.replay.feeding import Feed
from healcore.tools.sweep.orders import Orders
from healcore.tools.sweep.series import Series

WORD = 32
"""Rows of a group."""

GROUPS = 512
"""Groups of a reel. One long series takes a reel 4 times as long, or 4 times that, and so on."""


class Columns(NamedTuple):
    """All rows of a reel; those beyond the last group's are not judged."""

    signals: np.ndarray
    """float32 (rows, signals of the feed)."""
    kind: np.ndarray
    """int32 (rows,): which of the feed's combinations the row has."""
    resumed: np.ndarray
    """bool (rows,): see `Series`."""
    own: np.ndarray
    """bool (rows,): counts."""


class Groups(NamedTuple):
    """int32 or bool (groups,) each; a group without rows has `start == stop`."""

    start: np.ndarray
    stop: np.ndarray
    fresh: np.ndarray
    """A series begins here."""


class Reel(NamedTuple):
    """Some series of one feed."""

    feed: Feed
    series: tuple[Series, ...]
    which: tuple[int, ...]
    """Their places among all that were packed."""
    columns: Columns
    groups: Groups
    first: tuple[int, ...]
    """The group in which each begins."""

    def orders(self, words: np.ndarray, skipped: np.ndarray, recovered: np.ndarray) -> list[Orders]:
        """What came out, for each series.

        Args:
            words: uint32 (groups, variants): bit `j` is the order at the group's row `j`.
            skipped: (groups, variants): skips of the group's own rows.
            recovered: (groups, variants): first orders of incidents, of the group's own rows.
        """
        ends = (*self.first[1:], len(words))
        return [
            Orders.from_bits(
                words[first:end],
                skipped[first:end].sum(axis=0, dtype=np.int32),
                recovered[first:end].sum(axis=0, dtype=np.int32),
                each.own,
            )
            for each, first, end in zip(self.series, self.first, ends, strict=True)
        ]


def pack(series: Sequence[Series]) -> list[Reel]:
    """Puts every series into a reel of its feed."""
    reels: list[Reel] = []
    for feed in dict.fromkeys(each.feed for each in series):
        batch: list[int] = []
        for i in (i for i, each in enumerate(series) if each.feed == feed):
            if batch and sum(_groups(series[j]) for j in (*batch, i)) > GROUPS:
                reels.append(_reel(feed, series, batch))
                batch = []
            batch.append(i)
        reels.append(_reel(feed, series, batch))
    return reels


def _groups(series: Series) -> int:
    return -(-series.length // WORD)


def _reel(feed: Feed, series: Sequence[Series], which: Sequence[int]) -> Reel:
    """Columns and groups, at a length that few programs serve."""
    needed = sum(_groups(series[i]) for i in which)
    count = GROUPS
    while count < needed:
        count *= 4
    columns = Columns(
        np.zeros((count * WORD, len(feed.signals)), np.float32),
        np.zeros(count * WORD, np.int32),
        np.zeros(count * WORD, bool),
        np.zeros(count * WORD, bool),
    )
    groups = Groups(np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, bool))
    first, group = [], 0
    for each in (series[i] for i in which):
        start, stop = group * WORD, group * WORD + each.length
        for place, name in enumerate(feed.signals):
            columns.signals[start:stop, place] = each.rows.values[name]
        columns.kind[start:stop] = each.rows.kind
        columns.resumed[start:stop] = each.resumed
        columns.own[start + each.own : stop] = True
        end = group + _groups(each)
        groups.start[group:end] = np.arange(group, end) * WORD
        groups.stop[group:end] = np.minimum(groups.start[group:end] + WORD, stop)
        groups.fresh[group] = True
        first.append(group)
        group = end
    return Reel(feed, tuple(series[i] for i in which), tuple(which), columns, groups, tuple(first))
