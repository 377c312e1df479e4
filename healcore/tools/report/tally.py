"""What the metrics know of alarms: all of them, where the events name the first of an incident."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

from healcore.tools.report.case import Case
from healcore.tools.report.metric_lines import Chunk
from healcore.tools.report.story import Incident


class Tally:
    """Counts, chunk by chunk; of metrics that were thinned, estimates.

    Args:
        incidents: by attempt and step.

    Attributes:
        told: the rows have told what the policy made of them.
        alarms: steps with a cause.
        skips: steps that were skipped.
        clips: steps whose gradients were clipped.
        ends: by place in `incidents`, step and index of the last alarm.
    """

    def __init__(self, incidents: Sequence[Incident]) -> None:
        self.told = False
        self.alarms = self.skips = self.clips = 0
        self.ends: dict[int, tuple[float, int]] = {}
        self._skipped: Counter[int] = Counter()
        self._begins: defaultdict[int, list[tuple[float, int]]] = defaultdict(list)
        for place, case in enumerate(incidents):
            self._begins[case.attempt].append((case.onset_step, place))
        for begins in self._begins.values():
            begins.sort()

    def add(self, chunk: Chunk, index: np.ndarray) -> None:
        """Takes one chunk and the indices of its rows."""
        if chunk.flags is None:
            return
        self.told = True
        alarm, skip, clip = chunk.flags.T
        every = 1 if chunk.every is None else chunk.every
        self.alarms += int((alarm * every).sum())
        self.skips += int((skip * every).sum())
        self.clips += int(((clip & ~skip) * every).sum())
        for attempt in np.unique(chunk.attempt[alarm]).tolist():
            begins = self._begins.get(attempt)
            if begins:
                self._extend(begins, alarm & (chunk.attempt == attempt), chunk, index)

    def _extend(
        self,
        begins: list[tuple[float, int]],
        rows: np.ndarray,
        chunk: Chunk,
        index: np.ndarray,
    ) -> None:
        """An alarm is of the incident that has begun last."""
        assert chunk.flags is not None
        step, index, skip = chunk.step[rows], index[rows], chunk.flags[rows, 1]
        which = np.searchsorted([onset for onset, _ in begins], step, side="right") - 1
        for each in np.unique(which[which >= 0]).tolist():
            place, mine = begins[each][1], np.flatnonzero(which == each)
            self.ends[place] = float(step[mine[-1]]), int(index[mine[-1]])
            self._skipped[place] += int(skip[mine].sum())

    def completed(self, place: int, case: Case) -> Incident:
        """An incident with the alarms that have no event of their own.

        Args:
            place: of it in `incidents`.
            case: the same, as the events have told it.
        """
        case.skipped = max(case.skipped, self._skipped[place])
        case.step = max(case.step, self.ends.get(place, (case.step, -1))[0])
        case.counted = True
        return case.told()
