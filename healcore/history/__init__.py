"""A run, read from its events and metrics: numbers and enums, no text for people.

The postmortem, `healcore report`, `watch`, `replay` and the demo write text from it. It imports
only `healcore.core` and `healcore.runtime.events`: the rest of the runtime depends on it, since the
next start of a run writes the postmortem of one that was killed.
"""

from __future__ import annotations

from healcore.history.curves import Curves
from healcore.history.incident import Counts, Incident, IncidentOutcome, Mode
from healcore.history.run import Run, runs_of

__all__ = ["Counts", "Curves", "Incident", "IncidentOutcome", "Mode", "Run", "runs_of"]
