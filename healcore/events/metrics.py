"""Writes the metrics file: one JSON object per step, for `healcore replay` and `report`.

The host reads these numbers for the policy, so the metrics need no further copy or sync.
docs/events.md describes the fields.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from healcore.core.step_record import StepRecord
from healcore.core.verdict import Cause, names
from healcore.events.log import append, to_json, warn_of_loss

SCHEMA = 1

_NUMBERS = ("threshold", "z", "z_loss", "grad_scale", "lr_scale")
"""Fields of a `StepRecord` that every line has."""
COMPARED = ("loss_ratio", "eval_loss", "eval_gap")
"""Fields of a `StepRecord` that are None where they are unknown."""
_FLUSH_SECONDS = 0.5
"""Time for which lines are buffered, because a system call per step would be slow."""
_MAX_BUFFERED = 1000
_UNTHINNED = 50_000  # steps after which a thinned file doubles the number of steps per line


def stem(path: Path) -> str:
    """Returns the common part of the names of a run's files: `run` for `run.events.jsonl`."""
    return re.sub(r"(\.events|\.metrics)?\.jsonl?$", "", path.name)


def path_next_to(events: Path) -> Path:
    """Returns the path of the metrics file that belongs to an events file."""
    return events.with_name(f"{stem(events)}.metrics.jsonl")


@dataclass(eq=False)
class Metrics:
    """Appends a line per step and engine. No method raises.

    After a rollback or a restart the file continues with a smaller `step`: the new lines replace
    the lines of the undone steps. A killed process loses up to half a second of lines.
    """

    path: Path | None  # the file, or None to write nothing
    run: str  # the run's id, as in its events
    automatic: bool = False
    """Whether healcore has chosen the path. Then links are not followed, as in `log.append`, and
    the file is thinned: after 50,000 steps it has only every second step, after 100,000 every
    fourth, and so on, and all steps with an alarm. A line for several steps has the field `every`.
    The file grows by about 8 MB each time the run gets twice as long."""
    tracked: bool = False
    """Whether `write` returns the fields of every step, for the run's trackers."""

    def __post_init__(self) -> None:
        self.lost = 0
        self._lines: list[str] = []
        self._flushed = time.monotonic()
        self._logged: set[tuple[str, str]] = set()  # engine and received signal

    def write(self, step: int, record: StepRecord, *, several: bool) -> dict[str, Any] | None:
        """Adds a line for a step of one engine, with its name if the run has `several` engines.

        Returns the fields of the line, or None for a step without a line, unless `tracked`.
        """
        every = 1
        if self.automatic and not record.cause:
            every <<= (step // _UNTHINNED).bit_length()
        written = self.path is not None and step % every == 0
        if not record.judged or not (written or self.tracked):
            return None
        try:
            fields = self._fields(record, several)
            if written:
                head = {"schema": SCHEMA, "kind": "step", "run": self.run}
                head |= {"time": round(time.time(), 3), "step": step}
                line = head | ({"every": every} if every > 1 else {}) | fields
                self._lines.append(json.dumps(line, allow_nan=False, separators=(",", ":")) + "\n")
        except Exception:  # from converting a value of the driver; the training continues
            self.lost += 1
            fields = None
        if len(self._lines) >= _MAX_BUFFERED or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()
        return fields

    def flush(self) -> None:
        """Writes the buffered lines."""
        self._flushed = time.monotonic()
        if self.path is None or not self._lines:
            return
        lines, self._lines = self._lines, []
        try:
            append(self.path, "".join(lines).encode("ascii"), follow_links=not self.automatic)
        except Exception as error:
            if not self.lost:
                warn_of_loss("metrics", self.path, error)
            self.lost += len(lines)

    def _fields(self, record: StepRecord, several: bool) -> dict[str, Any]:
        fields = {"engine": record.engine} if several else {}
        fields |= self._signals(record)
        numbers = {name: getattr(record, name) for name in (*_NUMBERS, *COMPARED)}
        numbers["lr"] = None if record.lr in (0.0, 1.0) else record.lr
        fields |= {n: to_json(float(v)) for n, v in numbers.items() if v is not None}
        flags = {"cause": names(record.cause), "action": names(record.action)}
        return fields | {"skip": record.skip, **flags}

    def _signals(self, record: StepRecord) -> dict[str, Any]:
        """Returns the loss and norm of the step; "nan" replaces the last finite value.

        The engine starts with zeros, so a signal that has always been 0 is not received.
        """
        signals: dict[str, Any] = {}
        for name, value, nonfinite in (
            ("loss", record.loss, Cause.NONFINITE_LOSS),
            ("grad_norm", record.grad_norm, Cause.NONFINITE_GRAD),
        ):
            if value != 0 or record.cause & nonfinite:
                self._logged.add((record.engine, name))
            if (record.engine, name) in self._logged:
                signals[name] = "nan" if record.cause & nonfinite else to_json(float(value))
        return signals
