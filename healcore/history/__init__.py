"""Reads a run from its events and metrics as data: numbers and enums, without sentences.

This package imports only `healcore.core` and `healcore.events`, because the runtime imports it: a
start reads what the processes before it have done.
"""

from __future__ import annotations

from healcore.history.curves import Curves
from healcore.history.run_history import Counts, Incident, Mode, RunHistory, runs_of

__all__ = ["Counts", "Curves", "Incident", "Mode", "RunHistory", "runs_of"]
