"""Writes JSON Lines to standard output, where collectors of container logs read them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from healcore.events import json_lines


class Client:
    """A line per step and per event; at each call the `sys.stdout` of that moment."""

    def __init__(self, where: str | None, own: None) -> None:
        pass

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Writes `{"kind":"metrics","step":7,"heal/loss":2.31,...}`."""
        self._write({"kind": "metrics", "step": step, **values})

    def event(self, event: Mapping[str, Any]) -> None:
        """Writes the event with all its fields."""
        self._write(event)

    def flush(self) -> None:
        """Passes the lines on."""
        sys.stdout.flush()

    def _write(self, fields: Mapping[str, Any]) -> None:
        sys.stdout.write(json_lines.encode(fields).decode("ascii"))
