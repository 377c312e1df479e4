"""Writes scalars and events for TensorBoard, without torch or TensorFlow."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from healcore.runtime.trackers.tracker import TrackedRun, event_text

_events: Any = event_pb2  # protobuf creates the classes at run time: unknown to type checkers
_summaries: Any = summary_pb2


def hide_undone(writer: Any, step: int) -> None:
    """Makes TensorBoard hide earlier records of an event file for `step` and later steps.

    `SummaryWriter(purge_step=...)` does the same at the start of a file. TensorBoard hides records
    of all tags, so all steps of the writer must be optimizer steps.
    """
    start = _events.SessionLog(status=_events.SessionLog.START)
    writer.add_event(_events.Event(wall_time=time.time(), step=step, session_log=start))


class Client:
    """Writes to a new event file, in a restarted program in the same directory."""

    def __init__(self, directory: str | None) -> None:
        self._directory = directory
        self._last_step = -1

    def start(self, run: TrackedRun) -> None:
        """Opens the event file."""
        self._writer = EventFileWriter(self._directory or os.path.join("runs", run.id))
        policy = run.config.get("policy_toml", run.config["policy"])
        self._add(0, text_pb("heal/policy", f"```\n{policy}\n```"))

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Adds scalars."""
        if step < self._last_step:
            hide_undone(self._writer, step)
        self._last_step = step
        scalar = _summaries.Summary.Value
        scalars = [scalar(tag=name, simple_value=value) for name, value in values.items()]
        self._add(step, _summaries.Summary(value=scalars))

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds the event as text."""
        self._add(event["step"] or 0, text_pb("heal/events", event_text(event)))

    def flush(self) -> None:
        """Flushes the file."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the file."""
        self._writer.close()

    def _add(self, step: int, summary: Any) -> None:
        self._writer.add_event(_events.Event(wall_time=time.time(), step=step, summary=summary))
