"""What one file's reader hands to the weaver."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import numpy as np

from healcore.tools.traces.findings import Findings


class Batch(NamedTuple):
    """Some rows of one file, as they stand in it."""

    line: np.ndarray
    """int64 (n,): line numbers from 1; 0 where the format has no lines."""
    row: np.ndarray | None
    """int64 (n,): the file's own row numbers from 0, where they are to stay as they are (CSV);
    None: the weaver counts."""
    end: int
    """With `row`: how many rows the file has up to here, those left out included."""
    step: np.ndarray | None
    """float64 (n,), finite; None: the file has no steps."""
    values: Mapping[str, np.ndarray]
    """float32 (n,) per signal, NaN where not given."""
    given: Mapping[str, np.ndarray]


class Reader(Protocol):
    """One file of a known kind. Re-iterable."""

    path: str

    def batches(self, findings: Findings) -> Iterator[Batch]:
        """The file from its beginning, in batches of at most `trace.CHUNK` rows."""
        ...


def joined(first: Batch | None, second: Batch) -> Batch:
    """Two batches of one file, one after the other."""
    if first is None or not len(first.line):
        return second

    def both(one: np.ndarray | None, two: np.ndarray | None) -> np.ndarray | None:
        return None if one is None or two is None else np.concatenate([one, two])

    def columns(kind: str, absent: float | bool, dtype: type) -> dict[str, np.ndarray]:
        one, two = getattr(first, kind), getattr(second, kind)
        return {
            name: np.concatenate(
                [
                    one.get(name, np.full(len(first.line), absent, dtype)),
                    two.get(name, np.full(len(second.line), absent, dtype)),
                ]
            )
            for name in {**one, **two}
        }

    return Batch(
        line=np.concatenate([first.line, second.line]),
        row=both(first.row, second.row),
        end=second.end,
        step=both(first.step, second.step),
        values=columns("values", np.nan, np.float32),
        given=columns("given", False, np.bool_),
    )


def cut(batch: Batch, low: int, high: int | None) -> Batch:
    """Rows `low` to `high` of a batch."""
    part = slice(low, high)
    return batch._replace(
        line=batch.line[part],
        row=None if batch.row is None else batch.row[part],
        step=None if batch.step is None else batch.step[part],
        values={name: value[part] for name, value in batch.values.items()},
        given={name: value[part] for name, value in batch.given.items()},
    )
