"""Writes and reads the events file of a run: one JSON object per line.

docs/events.md describes the format, docs/events.schema.json is its JSON Schema.
"""

from __future__ import annotations

from healcore.events.log import EventsFile, LineProblem, Log, read

__all__ = ["EventsFile", "LineProblem", "Log", "read"]
