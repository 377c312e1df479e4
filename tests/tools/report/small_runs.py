"""Real runs, small ones: a torch Healer with NaN in its data, its events and its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.healer import training_loops
from tests.healer.training_loops import Faults, loop_of


def train(
    folder: Path,
    bad: Iterable[int],
    *,
    policy: Any = "pretraining",
    batches: int = 600,
    **more: Any,
) -> Path:
    """A run in `folder` with NaN in some batches. Returns its events file, also if it is stopped.

    A store in `more` continues the run before.
    """
    events, data = folder / "run.events.jsonl", range(batches)
    options = {"events": events, "metrics": folder / "run.metrics.jsonl", "save_every": None}
    with contextlib.suppress(SystemExit):
        training_loops.train(loop_of("torch", Faults(always=bad)), policy, data, **options, **more)
    return events


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The content of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
