"""Reads a run from its events and metrics into numbers and enums, without text for people.

It imports only `healcore.core` and `healcore.events`. The rest of the runtime depends on
it: the next start of a run writes the postmortem of one that was killed.
"""

from __future__ import annotations

from healcore.history.curves import Curves
from healcore.history.incident import Counts, Incident, IncidentOutcome, Mode
from healcore.history.run import Run, runs_of

__all__ = ["Counts", "Curves", "Incident", "IncidentOutcome", "Mode", "Run", "runs_of"]
