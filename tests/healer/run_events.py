"""Events and postmortems of a run, for tests."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """All events of a store's directory, or those of one kind."""
    lines = (folder / "healcore.events.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [event for event in found if kind in (None, event["kind"])]


def postmortems(folder: Path) -> list[dict[str, Any]]:
    """Oldest first."""
    found = [json.loads(path.read_text()) for path in folder.glob("*postmortem*.json")]
    return sorted(found, key=lambda each: each["ended"])
