"""The directory of a run: its events, its postmortems, and damage to its files."""

import json
import random
from pathlib import Path
from typing import Any

from healcore.runtime.run.run import Run


def new_process() -> None:
    """Forgets which runs this process has completed, as a new process does."""
    Run.completed.clear()


def events(folder: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """All events of a store's directory, or those of one kind."""
    found = events_of(folder / "healcore.events.jsonl")
    return [event for event in found if kind in (None, event["kind"])]


def postmortems(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(path.read_text()) for path in folder.glob("*postmortem*.json")]
    return sorted(found, key=lambda each: each["ended"])


def events_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def flip_a_bit(folder: Path, seed: int) -> None:
    """Flips a bit of the arrays of a checkpoint."""
    chance = random.Random(seed)
    files = [path for path in (folder / "data").rglob("*") if path.is_file()]
    path = chance.choice(sorted(file for file in files if file.stat().st_size))
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def remove_a_file(folder: Path) -> None:
    """Makes a checkpoint incomplete."""
    (folder / "state.json").unlink()
