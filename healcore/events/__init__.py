"""Writes and reads the events file of a run: one JSON object per line.

docs/events.md describes the format, docs/events.schema.json is its JSON Schema.
"""

from __future__ import annotations

import warnings
from typing import Any

from healcore.events.events_file import EventsFile, LineProblem, read
from healcore.events.log import Log

__all__ = ["EventsFile", "LineProblem", "Log", "read"]


def __getattr__(name: str) -> Any:
    """Returns a class by its deprecated name."""
    if name == "History":
        warnings.warn(
            "healcore.events.History is deprecated: write healcore.events.EventsFile",
            DeprecationWarning,
            stacklevel=2,
        )
        return EventsFile
    raise AttributeError(f"module 'healcore.events' has no attribute {name!r}")
