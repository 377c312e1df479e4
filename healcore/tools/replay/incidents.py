"""Incidents of a replay, as the engine opens and closes them."""

from __future__ import annotations

from collections import Counter

import numpy as np

from healcore.core.verdict import Action, Cause, names
from healcore.history import Incident, Mode
from healcore.tools.replay.decided import Judged, shortest

MOST_KEPT = 1000
"""Incidents of one replay that are kept for the report; all are counted."""


class _Open:
    """The incident in progress."""

    def __init__(self, judged: Judged, row: int, lr_before: float) -> None:
        self.attempt = judged.attempt
        self.onset, self.onset_step = int(judged.index[row]), float(judged.step[row])
        self.index, self.step = self.onset, self.onset_step
        self.last, self.last_step = self.onset, self.onset_step
        self.stop = -1
        self.stop_step: float | None = None
        self.cause, self.action = Cause(0), Action(0)
        self.skipped = self.clipped = 0
        self.denied = self.repeat_denied = False
        self.repeats = 0
        self.lr_before = self.lr_after = lr_before

    def add(self, judged: Judged, row: int, action: int, spent: bool) -> None:
        """One more alarm."""
        self.last, self.last_step = int(judged.index[row]), float(judged.step[row])
        self.cause |= Cause(int(judged.record.cause[row]))
        ordered = Action.ROLLBACK | Action.STOP
        if not self.action & ordered:  # the first such order is where the incident is placed
            self.index, self.step = int(judged.index[row]), float(judged.step[row])
        again = bool(judged.again[row])
        if not judged.ends[row]:
            action &= ~int(Action.STOP)
        elif action & Action.STOP and self.stop < 0:
            self.stop, self.stop_step = self.last, self.last_step
        self.action |= Action(action)
        self.skipped += bool(judged.record.skip[row])
        self.clipped += bool(judged.clipped[row])
        if again:  # what follows had going back not helped, and there it does not
            self.repeats += bool(action & Action.ROLLBACK) and not spent
            self.repeat_denied |= spent
        else:
            self.denied |= spent
            self.lr_after = shortest(judged.record.lr_scale[row])


class ReplayIncidents:
    """Follows the incidents chunk by chunk."""

    def __init__(self) -> None:
        self.kept: list[Incident] = []
        self.count = 0
        self.first: float | None = None
        self.last: float | None = None
        self.by_attempt: Counter[int] = Counter()
        self._open: _Open | None = None
        self._number = 0
        self._lr = 1.0

    def begin_attempt(self, *, goes_on: bool) -> None:
        """An attempt begins, which ends what was open.

        Args:
            goes_on: the engine's count and its LR multiplier go on; false: it is a new engine.
        """
        self._close()
        if not goes_on:
            self._number, self._lr = 0, 1.0

    def add(self, judged: Judged) -> None:
        """Reads one chunk."""
        record, action, spent = judged.record, judged.action, judged.spent
        previous = np.concatenate(([self._number], record.incident[:-1]))
        opened = record.incident != previous
        alarmed = record.incident_open & (record.cause != 0)
        for row in np.flatnonzero(opened | alarmed).tolist():
            if opened[row]:
                self._close()
                before = self._lr if row == 0 else shortest(record.lr_scale[row - 1])
                self._open = _Open(judged, row, before)
            if self._open is not None:
                self._open.add(judged, row, int(action[row]), bool(spent[row]))
        self._number = int(record.incident[-1])
        self._lr = shortest(record.lr_scale[-1])

    def close(self) -> None:
        """The trace has ended."""
        self._close()

    def _close(self) -> None:
        case, self._open = self._open, None
        if case is None:
            return
        self.count += 1
        self.first = case.onset_step if self.first is None else self.first
        self.last = case.onset_step
        self.by_attempt[case.attempt] += 1
        if len(self.kept) == MOST_KEPT:
            return
        cut = bool(case.action & Action.CUT_LR)
        self.kept.append(
            Incident(
                number=self.count,
                attempt=case.attempt,
                onset=case.onset,
                index=case.index,
                onset_step=case.onset_step,
                step=case.step,
                cause=tuple(names(case.cause)),
                action=tuple(names(case.action)),
                skipped=case.skipped,
                mode=Mode.REPLAY,
                clipped=case.clipped,
                repeats=case.repeats,
                denied=case.denied,
                repeat_denied=case.repeat_denied,
                lr_path=(case.lr_before, case.lr_after) if cut else (),
                stop=case.stop,
                stop_step=case.stop_step,
                last=case.last,
                last_step=case.last_step,
            )
        )
