"""Sends the metrics and events of a run to trackers, such as wandb, mlflow or TensorBoard.

docs/reports.md describes them.
"""

from __future__ import annotations

from healcore.runtime.trackers.trackers import Selection, Tracker, Trackers, select

__all__ = ["Selection", "Tracker", "Trackers", "select"]
