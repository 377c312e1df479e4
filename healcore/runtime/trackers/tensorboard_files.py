"""Writes scalars and events for TensorBoard, to own event files or to a SummaryWriter."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from tensorboard.compat.proto import event_pb2, summary_pb2
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from healcore.runtime.trackers.tracker import TrackedRun, text_of

_events: Any = event_pb2  # protobuf creates the classes at run time: unknown to type checkers
_summaries: Any = summary_pb2


def hide_undone(writer: Any, step: int) -> None:
    """Lets TensorBoard hide what a SummaryWriter has written for `step` and later steps.

    `SummaryWriter(purge_step=...)` writes the same at the start of a file. All tags are hidden, so
    all steps of the writer must be optimizer steps.
    """
    start = _events.SessionLog(status=_events.SessionLog.START)
    event = _events.Event(wall_time=time.time(), step=step, session_log=start)
    writer.file_writer.add_event(event)


class Client:
    """Writes to the user's SummaryWriter (torch or tensorboardX), else to own files.

    TensorBoard itself writes the files, without torch or TensorFlow.
    """

    def __init__(self, where: str | None, own: Any) -> None:
        self._folder = where
        self._users = own is not None
        self._writer: Any = own

    def start(self, run: TrackedRun) -> None:
        """Opens a new event file; a restarted program adds one in the same directory."""
        if not self._users:
            self._writer = _Files(self._folder or os.path.join("runs", run.id))
        policy = run.config.get("policy_toml", run.config["policy"])
        self._writer.add_text("heal/policy", f"```\n{policy}\n```")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Adds scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds a text."""
        self._writer.add_text("heal/events", text_of(event), event["step"])

    def flush(self) -> None:
        """Flushes the files."""
        self._writer.flush()

    def close(self) -> None:
        """Closes own files."""
        if not self._users:
            self._writer.close()


class _Files:
    """The methods of a SummaryWriter that are used here, with an `EventFileWriter`."""

    def __init__(self, folder: str) -> None:
        self.file_writer = EventFileWriter(folder)
        self._last = -1
        self.flush, self.close = self.file_writer.flush, self.file_writer.close

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if step < self._last:
            hide_undone(self, step)
        self._last = step
        one = _summaries.Summary.Value(tag=tag, simple_value=value)
        self._add(step, summary=_summaries.Summary(value=[one]))

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        self._add(step or 0, summary=text_pb(tag, text))

    def _add(self, step: int, **fields: Any) -> None:
        self.file_writer.add_event(_events.Event(wall_time=time.time(), step=step, **fields))
