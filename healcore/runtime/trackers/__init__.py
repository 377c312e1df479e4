"""Trackers: metrics and events of a run, sent to clients that people have already.

docs/trackers.md is the description for users.
"""

from __future__ import annotations

from healcore.runtime.trackers.delivery import Trackers
from healcore.runtime.trackers.selection import Selection, select
from healcore.runtime.trackers.tracker import TrackedRun, Tracker

__all__ = ["Selection", "TrackedRun", "Tracker", "Trackers", "select"]
