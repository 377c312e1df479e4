"""Writes scalars and events for TensorBoard, to new event files or to the user's SummaryWriter."""

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
    """Makes TensorBoard hide earlier records of a SummaryWriter for `step` and later steps.

    `SummaryWriter(purge_step=...)` does the same at the start of a file. TensorBoard hides records
    of all tags, so all steps of the writer must be optimizer steps.
    """
    start = _events.SessionLog(status=_events.SessionLog.START)
    event = _events.Event(wall_time=time.time(), step=step, session_log=start)
    writer.file_writer.add_event(event)


class Client:
    """Writes to the user's SummaryWriter (torch or tensorboardX), or else to new event files.

    The package tensorboard writes the event files, without torch or TensorFlow.
    """

    def __init__(self, where: str | None, user_writer: Any) -> None:
        self._folder = where
        self._owned_by_user = user_writer is not None
        self._writer: Any = user_writer

    def start(self, run: TrackedRun) -> None:
        """Opens a new event file, in a restarted program in the same directory."""
        if not self._owned_by_user:
            self._writer = _Files(self._folder or os.path.join("runs", run.id))
        policy = run.config.get("policy_toml", run.config["policy"])
        self._writer.add_text("heal/policy", f"```\n{policy}\n```")

    def metrics(self, step: int, values: dict[str, float]) -> None:
        """Adds scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def event(self, event: Mapping[str, Any]) -> None:
        """Adds the event as text."""
        self._writer.add_text("heal/events", event_text(event), event["step"])

    def flush(self) -> None:
        """Flushes the files."""
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file, except a writer of the user."""
        if not self._owned_by_user:
            self._writer.close()


class _Files:
    """The part of SummaryWriter that `Client` uses, with an `EventFileWriter`."""

    def __init__(self, folder: str) -> None:
        self.file_writer = EventFileWriter(folder)
        self._last_step = -1
        self.flush, self.close = self.file_writer.flush, self.file_writer.close

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        if step < self._last_step:
            hide_undone(self, step)
        self._last_step = step
        scalar = _summaries.Summary.Value(tag=tag, simple_value=value)
        self._add(step, summary=_summaries.Summary(value=[scalar]))

    def add_text(self, tag: str, text: str, step: int | None = None) -> None:
        self._add(step or 0, summary=text_pb(tag, text))

    def _add(self, step: int, **fields: Any) -> None:
        self.file_writer.add_event(_events.Event(wall_time=time.time(), step=step, **fields))
