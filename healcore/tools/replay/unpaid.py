"""Rollbacks that the budget does not pay for, told once per incident.

A live run ends at the first of them. On a recorded curve the incident may go on for thousands of
rows, and the engine asks again every `incident.patience` alarms: the same end, again and again.
"""

from __future__ import annotations

import numpy as np

from healcore.tools.replay.decided import Judged


class Unpaid:
    """Remembers the last incident whose end was told."""

    def __init__(self) -> None:
        self._told = (-1, -1)

    def once(self, judged: Judged) -> Judged:
        """The rows, with a rollback due that nobody pays for only where it is the incident's first.

        Args:
            judged: rows that follow those of the last call.
        """
        spent = np.flatnonzero(judged.spent)
        if not len(spent):
            return judged
        due = judged.verdict.due.copy()
        for row in spent:
            incident = (judged.attempt, int(judged.verdict.incident[row]))
            due[row] = incident != self._told
            self._told = incident
        return judged._replace(verdict=judged.verdict._replace(due=due))
