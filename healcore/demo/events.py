"""The events file: one JSON object per line, written as it happens."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from healcore.core.verdict import names
from healcore.demo.history import History, Step


class Events:
    """Writes what healing did, and what happened to the others.

    Line types: `start` (one, what is run), `step` (a healed step whose decision is not the neutral
    one; of the other runs the first step with a loss that is not finite), `rollback`, `result`
    (one per run). Numbers that JSON does not have (NaN, infinity) are null.
    """

    def __init__(self, path: Path) -> None:
        """Opens the file, empty, line-buffered.

        Raises:
            OSError: it cannot be written.
        """
        self.path = path
        self._file = path.open("w", encoding="utf-8", buffering=1)
        self._dead: set[tuple[str, str, int]] = set()

    def write(self, kind: str, **fields: Any) -> None:
        """Adds one line."""
        clean = {
            name: None if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in fields.items()
        }
        self._file.write(json.dumps({"type": kind, **clean}, allow_nan=False) + "\n")

    def step(self, history: History, step: Step) -> None:
        """Notes a step if there is something to note."""
        neutral = step.grad_scale == 1.0 and step.lr_scale == 1.0
        if history.arm == "healed":
            if neutral and not (step.skip or step.cause or step.action):
                return
        else:
            if math.isfinite(step.loss) or _key(history) in self._dead:
                return
            self._dead.add(_key(history))
        self.write(
            "step",
            **_which(history),
            step=step.step,
            loss=step.loss,
            grad_norm=step.grad_norm,
            skip=step.skip,
            grad_scale=step.grad_scale,
            lr_scale=step.lr_scale,
            cause=names(step.cause),
            action=names(step.action),
        )

    def rollback(self, history: History, step: int, to: int) -> None:
        """Notes that a run went back."""
        self.write("rollback", **_which(history), step=step, to=to)

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def _which(history: History) -> dict[str, Any]:
    return {"framework": history.framework, "run": history.arm, "seed": history.seed}


def _key(history: History) -> tuple[str, str, int]:
    return history.framework, history.arm, history.seed
