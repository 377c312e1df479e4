"""What happened to a run, put together from its events and metrics: numbers and enums, no English.

The postmortem, `healcore report`, `watch`, `replay` and the demo read it, and make sentences of it.
It stands on `healcore.core` and `healcore.runtime.events` only: the rest of the runtime is above,
since the next start of a run writes the postmortem of one that was killed.
"""

from __future__ import annotations

from healcore.history.counts import Counts
from healcore.history.curves import Curves
from healcore.history.incident import Incident, IncidentOutcome, Mode
from healcore.history.run import Run, runs_of

__all__ = ["Counts", "Curves", "Incident", "IncidentOutcome", "Mode", "Run", "runs_of"]
