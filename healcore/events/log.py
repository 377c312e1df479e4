"""`Log`: writes the events of a process as JSON lines."""

from __future__ import annotations

import json
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

from healcore.events.json_lines import (
    Event,
    append,
    encoded,
    warn_of_loss,
)
from healcore.events.process import current_process, environment
from healcore.events.schema import SCHEMA, Trait, has

TIME_FORMAT = "%Y-%m-%dT%H:%M:%S.%fZ"
"""Format of the field `time`: ISO 8601 in UTC, with microseconds."""


class Log:
    """Appends events to a file, to which other processes may write too.

    No method raises: a log that fails must not end a training run. Instead the logger `healcore`
    reports the first loss, and the field `lost` of the next event has the number of lost events.

    Args:
        path: the file, or None to write nothing. `write` returns its events then too.
        follow_links: as in `json_lines.append`.

    Attributes:
        process_id: field `run` of the events, from the start time and a random number.
        seq: number of the next event, from 0.
        lost: number of events that could not be written.

    Examples:
        >>> log = Log(None)
        >>> event = log.write("save", step=100)
        >>> event["seq"], event["kind"], event["step"]
        (0, 'save', 100)
    """

    def __init__(self, path: str | os.PathLike[str] | None, *, follow_links: bool = True) -> None:
        self.path = None
        if path is not None:
            self.path = Path(path)
        self.process_id = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"
        self.follow_links = follow_links
        self.seq = 0
        self.lost = 0
        self._reported = 0  # lost events that an event in the file has reported
        # Re-entrant, because a signal handler may write while it interrupts a `write`.
        self._lock = threading.RLock()

    def write(self, kind: str, *, step: int | None, **fields: object) -> Event:
        """Appends one event.

        Args:
            kind: a key of `schema.KINDS`. A `start` also gets the process and its environment.
            step: index of the optimizer step, or None for an event without a step.
            **fields: the further fields of `models.EventRecord`, of any type that `to_json` takes.
                Fields that are None are not written.

        Returns:
            The event as a reader of the file reads it: flags are lists of names, for example.
        """
        with self._lock:
            seq = self.seq
            self.seq += 1  # before writing: a signal handler may interrupt and needs its own number
            event, line = self._build(seq, kind, step, fields)
            if self.path is not None:
                self._append(self.path, kind, line)
            return event

    def _append(self, path: Path, kind: str, line: bytes) -> None:
        """Appends a line to the file, or counts it in `lost`."""
        lost = self.lost
        durable = has(kind, Trait.DURABLE)
        try:
            append(path, line, durable=durable, follow_links=self.follow_links)
            self._reported = lost
        except Exception as error:
            if not self.lost:
                warn_of_loss("events", path, error)
            self.lost += 1

    def _build(
        self, seq: int, kind: str, step: int | None, fields: dict[str, object]
    ) -> tuple[Event, bytes]:
        """Builds an event, and its line in ASCII.

        Both have the same values, so the caller of `write` sees what a reader of the file sees,
        without parsing the line again. ASCII, so that a torn line does not end inside a character.
        """
        values: dict[str, object] = {
            "schema": SCHEMA,
            "seq": seq,
            "run": self.process_id,
            "time": now(),
            "mono": round(time.monotonic(), 6),
            "kind": kind,
            "step": step,
        }
        if kind == "start":
            values |= current_process()._asdict()
            values["environment"] = environment()
        for name, value in fields.items():
            if value is not None:
                values[name] = value
        if self.lost > self._reported:
            values["lost"] = self.lost - self._reported
        event: Event = {}
        pairs: list[str] = []
        for name, value in values.items():
            # Encoded one by one, so that a value that cannot be encoded loses no other value.
            event[name], text = encoded(value)
            pairs.append(f"{json.dumps(name)}:{text}")
        line = f"{{{','.join(pairs)}}}\n"
        return event, line.encode("ascii")


def now() -> str:
    """The wall time in UTC, as ISO 8601 with microseconds."""
    return f"{datetime.now(UTC):{TIME_FORMAT}}"
