"""Reads a run from its events and metrics into numbers and enums, without text for people.

It imports only `healcore.core` and `healcore.events`. The runtime imports it, because the next
start of a killed run writes its postmortem.
"""

from __future__ import annotations

from healcore.history.curves import Curves
from healcore.history.incident import Counts, Incident, IncidentOutcome, Mode
from healcore.history.run import Run, runs_of

__all__ = ["Counts", "Curves", "Incident", "IncidentOutcome", "Mode", "Run", "runs_of"]
