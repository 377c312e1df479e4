"""Real runs, small ones: a torch Healer with NaN in its data, its events and its metrics."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.healer import training_loops
from tests.healer.training_loops import Faults, broken_at, loop_of


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


def broken_and_resumed(folder: Path) -> Path:
    """A process that dies of an exception at batch 330, and one that resumes its checkpoint."""
    store = folder / "checkpoints"
    with contextlib.suppress(RuntimeError):
        train(folder, range(150, 162), before=broken_at(330), store=store)
    return train(folder, range(450, 462), store=store)


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The content of a JSON-lines file."""
    return [json.loads(line) for line in path.read_text().splitlines()]
