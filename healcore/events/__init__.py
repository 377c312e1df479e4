"""Writes and reads the events file of a run: one JSON object per line.

docs/events.md describes the format, docs/events.schema.json is its JSON Schema.
"""

from __future__ import annotations

from healcore.events.events_file import EventsFile, LineProblem, read
from healcore.events.log import Log

__all__ = ["EventsFile", "LineProblem", "Log", "read"]
