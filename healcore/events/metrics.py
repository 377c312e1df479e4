"""`MetricsLog`: appends a line per step and engine to the metrics file of a run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from healcore.core.decision import Cause, names_of
from healcore.core.step_record import SKIPS, StepRecord, Why
from healcore.events.log import append, warn_of_loss

_METRICS_SCHEMA = 1

NUMBERS = ("threshold", "z", "z_loss", "grad_scale", "lr_scale")
"""Fields of a `StepRecord` that every line has."""
COMPARED = ("loss_ratio", "eval_loss", "eval_gap")
"""Fields of a `StepRecord` that are None where they are unknown."""
_FLUSH_SECONDS = 0.5
"""Time for which lines are buffered, because a system call per step would be slow."""
_MAX_BUFFERED = 1000
_LINES_AT_ONCE = 64
"""Number of steps of a dispatch from which a thinned file has 32 to 64 lines per dispatch, because
a line takes longer than a small compiled step."""
_UNTHINNED = 50_000  # steps after which a thinned file doubles the number of steps per line


@dataclass(eq=False)
class MetricsLog:
    """Appends a line per step and engine to the metrics file of a run.

    No method raises. After a rollback or a restart the file continues with a smaller `step`: the
    new lines replace the lines of the undone steps. Lines are buffered for half a second, because a
    system call per step would be slow; so a killed process loses up to half a second of lines.
    """

    path: Path | None
    """The file, or None to write nothing."""
    process_id: str
    """The id of this process, as in its events."""
    automatic: bool = False
    """Whether healcore has chosen the path. Then links are not followed, as in `append`, and
    the file is thinned: after 50,000 steps it has only every second step, after 100,000 every
    fourth, and so on, and all steps with an alarm. It has also fewer steps where one dispatch has
    64 or more. A line for several steps has the field `every`.
    The file grows by about 8 MB each time the run gets twice as long."""
    tracked: bool = False
    """Whether `write` returns the fields of every step, for the run's trackers."""

    def __post_init__(self) -> None:
        self._lines: list[bytes] = []
        self._flushed = time.monotonic()
        self._has_failed = False

    def write(
        self, step: int, record: StepRecord, *, several: bool, steps_at_once: int = 1
    ) -> dict[str, Any] | None:
        """Adds a line for a step of one engine.

        Args:
            step: index of the step in the run.
            record: the step as the engine judged it.
            several: whether the run has several engines. Then the line names the engine.
            steps_at_once: number of steps of the dispatch that the step belongs to.

        Returns:
            The fields of the line, without its head. None for a step without a line, unless
            `tracked`, and where no step was due.
        """
        every = 1  # number of steps that a line of a thinned file represents, a power of two
        if self.automatic and not record.cause:
            doublings = (step // _UNTHINNED).bit_length()
            every <<= doublings + (steps_at_once // _LINES_AT_ONCE).bit_length()
        written = self.path is not None and step % every == 0
        if record.why == Why.NOT_DUE or not (written or self.tracked):
            return None
        fields = _fields(record, several)
        if written:
            head: dict[str, Any] = {
                "schema": _METRICS_SCHEMA,
                "kind": "step",
                "run": self.process_id,
                "time": round(time.time(), 3),
                "step": step,
            }
            if every > 1:
                head["every"] = every
            self._lines.append(to_json(head | fields) + b"\n")
        if len(self._lines) >= _MAX_BUFFERED or time.monotonic() - self._flushed >= _FLUSH_SECONDS:
            self.flush()
        return fields

    def flush(self) -> None:
        """Writes the buffered lines. The first failure is logged."""
        self._flushed = time.monotonic()
        lines, self._lines = self._lines, []
        if self.path is None or not lines:
            return
        try:
            append(self.path, b"".join(lines), follow_links=not self.automatic)
        except Exception as error:
            if not self._has_failed:
                warn_of_loss("metrics", self.path, error)
            self._has_failed = True


def _fields(record: StepRecord, several: bool) -> dict[str, Any]:
    """The fields of a line. "nan" replaces the last finite loss or norm of a record.

    The engine has the loss 0 if the loop passes none, so a loss of 0 has no field.
    """
    fields: dict[str, Any] = {}
    if several:
        fields["engine"] = record.engine
    if record.judged:  # otherwise the record has the numbers of the step before
        for name, cause in (("loss", Cause.NONFINITE_LOSS), ("grad_norm", Cause.NONFINITE_GRAD)):
            if record.cause and record.cause & cause:
                fields[name] = "nan"
            elif name == "grad_norm" or record.loss != 0:
                fields[name] = float(getattr(record, name))
    for name in (*NUMBERS, *COMPARED, "lr"):
        value = getattr(record, name)
        if value is not None:
            fields[name] = float(value)
    for name, number in fields.items():  # `to_json` would test the type of each
        if isinstance(number, float) and not math.isfinite(number):
            fields[name] = str(number)
    fields["skip"] = record.why in SKIPS
    if record.why == Why.EXTERNAL:
        fields["scaler_skip"] = True
    fields["cause"] = names_of(record.cause)
    fields["action"] = names_of(record.action)
    return fields
