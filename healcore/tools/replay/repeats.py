"""Which rollback of an incident would have happened, and which only follow on a recorded curve.

A live run goes back at the first one. On a recorded curve, which does not heal, the engine asks
again every `incident.patience` alarms: the same trouble, again and again.
"""

from __future__ import annotations

import numpy as np

from healcore.core.verdict import Action
from healcore.tools.replay.decided import Judged


class Repeats:
    """Remembers the last incident in which a rollback was due."""

    def __init__(self) -> None:
        self._asked = (-1, -1)
        self._unpaid = (-1, -1)

    def mark(self, judged: Judged) -> Judged:
        """The rows with `again` and `ends`, and no more than one unpaid rollback in an incident.

        Args:
            judged: rows that follow those of the last call.
        """
        record = judged.record
        again = np.zeros(len(judged.index), bool)
        if judged.attempt == self._asked[0]:
            again = record.incident == self._asked[1]
        for row in np.flatnonzero(judged.due):
            incident = (judged.attempt, int(record.incident[row]))
            if incident != self._asked:
                self._asked = incident
                again[row + 1 :] = record.incident[row + 1 :] == incident[1]
        # Asking in vain, the engine orders STOP; a rule of the policy orders it without asking.
        ends = (record.action & int(Action.STOP) != 0) & ~(again & judged.due)
        due = judged.due.copy()
        for row in np.flatnonzero(judged.spent):
            incident = (judged.attempt, int(record.incident[row]))
            due[row] = incident != self._unpaid
            self._unpaid = incident
        return judged._replace(due=due, again=again, ends=ends)
