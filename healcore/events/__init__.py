"""The events file: what happened to a run, one JSON object per line, written as it happens.

docs/events.md is the description for users, docs/events.schema.json the JSON Schema.
"""

from __future__ import annotations

from healcore.events.log import History, LineProblem, Log, last, read

__all__ = ["History", "LineProblem", "Log", "last", "read"]
