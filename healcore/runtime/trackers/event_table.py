"""Collects the events of a run as rows, for trackers that show tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from healcore.runtime.trackers.tracker import text_of

_MOST = 1000
"""Rows; the events file has all."""


class EventTable:
    """The first events of a process: when something goes wrong for long, the cause is there."""

    columns = ("step", "kind", "time", "event")

    def __init__(self) -> None:
        self.rows: list[list[Any]] = []

    def add(self, event: Mapping[str, Any]) -> None:
        """Adds a row; the last one is always the newest event."""
        del self.rows[_MOST - 1 :]
        self.rows.append([event["step"], event["kind"], event["time"], text_of(event)])
