"""Writing the events file. A disk that fails costs events, never the training."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from healcore.runtime import forking
from healcore.runtime.events import encoding, reading
from healcore.runtime.events.appending import Appender
from healcore.runtime.events.environment import environment
from healcore.runtime.events.process import here

_log = logging.getLogger(__name__)

# Without waiting for a disk a kill loses nothing: the line is in the kernel when `write` returns.
# A power cut takes what the kernel has not written yet (Linux: some 30 s). So we wait where the
# story turns, and not at every alarm: those come many at a time, on a disk that may be busy.
_DURABLE = frozenset({"start", "incident", "rollback", "stop", "end"})


class Log:
    """Appends events to a file; several processes may do so at once.

    Nothing in here raises. What could not be written is counted in `lost`, told in the field
    `lost` of the next event that can be, and the first time on the logger `healcore`.

    Args:
        path: the file; it goes on where an earlier process has left off. Its directory is made.
            None: nothing is written.
        run: id of the run, of this process and no other. None: a new one.
        named: as in `Appender`.

    Attributes:
        run: the id.
        seq: number of the next event.
        lost: events that could not be written, so far.
        trouble: why the last one could not; None if it could.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        *,
        run: str | None = None,
        named: bool = True,
    ) -> None:
        self.path = None if path is None else Path(path)
        self.run = run or new_run()
        self.seq = 0
        self.lost = 0
        self.trouble: str | None = None
        self._told = 0
        self._out = None if self.path is None else Appender(self.path, named=named)
        # Re-entrant: a signal handler may write while the code that it interrupted does.
        self._lock = threading.RLock()
        forking.watch(self)
        if self.path is not None:
            with contextlib.suppress(Exception):  # a file that cannot be read may be written to
                event = reading.last(self.path) if self.path.is_file() else None
                self.seq = 0 if event is None else event["seq"] + 1

    def write(self, kind: str, *, step: int | None, **fields: Any) -> bool:
        """Appends one event.

        Args:
            kind: one of `models.KINDS`. A `start` gets the process and its environment added.
            step: index of the optimizer step, from 0; None where there is none.
            **fields: as in docs/events.md; those that are None are left out. Any value: what JSON
                has not becomes text.

        Returns:
            Whether it is in the file.
        """
        if self._out is None:
            return False
        with self._lock:
            seq = self.seq
            self.seq += 1  # taken before anything else: an interrupting handler gets the next one
            try:
                self._append(self._out, kind, self._line(seq, kind, step, fields))
            except Exception as error:
                self._missed(error)
                return False
            self.trouble = None
            return True

    def forked(self) -> None:
        """In a child: whoever held the lock is not there."""
        self._lock = threading.RLock()

    def close(self) -> None:
        """Closes the file. A later `write` opens it again."""
        with self._lock:
            if self._out is not None:
                self._out.close()

    # -- one line ---------------------------------------------------------------------------------

    def _line(self, seq: int, kind: str, step: int | None, fields: dict[str, Any]) -> bytes:
        told = {name: value for name, value in fields.items() if value is not None}
        if kind == "start":
            told = {**here()._asdict(), "environment": environment(), **told}
        if self.lost > self._told:
            told["lost"] = self.lost - self._told
        return encoding.line(
            {
                "schema": reading.SCHEMA,
                "seq": seq,
                "run": self.run,
                "time": now(),
                "mono": round(time.monotonic(), 6),
                "kind": kind,
                "step": step,
                **told,
            }
        )

    def _append(self, out: Appender, kind: str, line: bytes) -> None:
        lost = self.lost
        out.append(line, durable=kind in _DURABLE)
        self._told = lost

    def _missed(self, error: Exception) -> None:
        self.lost += 1
        self.trouble = f"{type(error).__name__}: {error}"
        if self.lost == 1:
            with contextlib.suppress(Exception):  # the user's own logging handlers
                _log.warning(
                    "events are being lost, training goes on: %s (%s)", self.path, self.trouble
                )


def new_run() -> str:
    """A run id: when it began, and random."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-{secrets.token_hex(4)}"


def now() -> str:
    """Wall time, ISO 8601, UTC, in microseconds."""
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%S.%f}Z"
