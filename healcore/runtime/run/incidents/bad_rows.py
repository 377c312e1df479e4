"""`BadRows`: notices that each epoch has NaN or Inf, so that the same rows are probably bad."""

from __future__ import annotations

from collections.abc import Sequence

from healcore.console import counted, first_of
from healcore.runtime.data import BatchId

_EPOCHS = 3
"""Epochs in a row with NaN or Inf after which the rows of the data are suspected."""


class BadRows:
    """Notices incidents with NaN or Inf in several epochs in a row. It decides nothing.

    With shuffled data the same bad row is in another batch of each epoch, so the lines of these
    steps look unrelated.
    """

    def __init__(self) -> None:
        self._epoch = -2
        """Epoch of the newest incident. No epoch follows -2."""
        self._count = 0
        """Epochs in a row with an incident."""
        self._common: set[int] | None = None
        """Rows of the batches of all earlier epochs of the count, or None before the second."""
        self._rows: set[int] = set()
        """Rows of the batches of the newest epoch."""
        self._is_found = False

    def add(self, batches: Sequence[BatchId]) -> str:
        """Adds the first step of an incident with NaN or Inf.

        Args:
            batches: the batches of the step; empty if the program reads its own data.

        Returns:
            A clause for the log at the third epoch in a row, else an empty string.
        """
        if not batches or self._is_found:
            return ""
        rows: set[int] = set()
        for batch in batches:
            rows.update(batch.rows or ())
        epoch = batches[-1].epoch
        if epoch == self._epoch:
            self._rows |= rows
            return ""
        if epoch != self._epoch + 1:
            self._count, self._common = 0, None
        elif self._common is None:
            self._common = self._rows
        else:
            self._common &= self._rows
        self._epoch, self._rows = epoch, rows
        self._count += 1
        if self._count < _EPOCHS:
            return ""
        self._is_found = True
        return self._text(rows & (self._common or set()))

    def _text(self, rows: set[int]) -> str:
        """The clause, with the rows that each epoch's batches had in common."""
        text = (
            f"each of the last {counted(_EPOCHS, 'epoch')} had NaN or Inf: probably in the same "
            "rows of the data"
        )
        if rows:
            names = first_of([str(row) for row in sorted(rows)], 5)
            text += f". All of these batches have row {names}"
        return text
