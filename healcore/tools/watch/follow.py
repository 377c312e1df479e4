"""Follows the growing files of a run, in a terminal or a pipe."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from healcore import regular_file
from healcore.core.errors import HealcoreError
from healcore.events.json_lines import MAX_LINE_BYTES
from healcore.events.metrics import path_next_to
from healcore.events.models import EventRecord
from healcore.events.schema import SEVERE
from healcore.policy import Policy
from healcore.tools.report.runs import read_postmortem
from healcore.tools.watch.live_run import LiveRun, event_line, one_line, state_lines

COMPLETED, FAILED = 0, 1
"""Exit statuses."""

_WAITING = "does not exist yet: waiting for the run to start (Ctrl-C ends)"
"""What follows the path of a missing file."""

_POLL_INTERVAL = 0.5
"""Seconds between polls, equal to the interval at which the Healer writes metrics."""
_CHECK_AFTER = 3.0
"""Seconds without a new line after which the process is checked."""
_EARLIER_LINES = 20
"""Limit of earlier events that are printed at the start."""
_METRICS_BYTES = 1 << 16
"""Number of bytes of the metrics that are read at the start."""
_MAX_DAMAGED = 20
"""Number of damaged lines after which a file without an event is rejected."""
_BLOCK_BYTES = 1 << 20


class WatchError(HealcoreError, ValueError):
    """A file cannot be watched."""


class NewLines(NamedTuple):
    """The lines added to a file since the last poll."""

    lines: list[bytes]
    """Whole lines, without newlines."""
    replaced: bool
    """Whether the file was replaced or emptied, so that the lines are from its beginning."""
    more: bool
    """Whether the file may have more lines to read."""


class Tail:
    """Reads a growing file. The file may not exist yet, and may be rotated or emptied.

    Args:
        path: the file.
        last_bytes: where the first poll starts, in bytes before the end, or None for all lines.

    Attributes:
        exists: whether the file existed at the last poll.
        error_text: why the last poll could not read the file, or an empty string.
    """

    def __init__(self, path: Path, *, last_bytes: int | None = None) -> None:
        self.path = path
        self.exists = False
        self.error_text = ""
        self._last_bytes = last_bytes
        self._identity: tuple[int, int] | None = None
        self._position = 0
        self._incomplete = b""  # the last line, before its newline is written

    def poll(self) -> NewLines:
        """Reads the new lines. Does not raise: see `exists` and `error_text`."""
        self.error_text = ""
        try:
            with open(self.path, "rb", opener=regular_file.opener) as file:
                self.exists = True
                return self._read(file, os.fstat(file.fileno()))
        except FileNotFoundError:
            self.exists = False
        except OSError as error:
            self.error_text = f"{self.path}: {error.strerror or error}"
        return NewLines([], False, False)

    def _read(self, file: BinaryIO, stat: os.stat_result) -> NewLines:
        identity = (stat.st_dev, stat.st_ino)
        is_first = self._identity is None
        is_new = identity != self._identity or stat.st_size < self._position
        if is_new:
            self._identity, self._incomplete, self._position = identity, b"", 0
            if self._last_bytes is not None and stat.st_size > self._last_bytes:
                self._position = stat.st_size - self._last_bytes
                file.seek(self._position)
                self._position += len(file.readline())  # the end of a line
        file.seek(self._position)
        block = file.read(_BLOCK_BYTES)
        self._position += len(block)
        *lines, self._incomplete = (self._incomplete + block).split(b"\n")
        if len(self._incomplete) > MAX_LINE_BYTES:
            lines, self._incomplete = [*lines, self._incomplete[:80]], b""
        return NewLines(lines, is_new and not is_first, len(block) == _BLOCK_BYTES)


class RunWatcher:
    """Prints the new events of a run, whose file may not exist yet, and reads its metrics."""

    def __init__(self, path: Path, policy: Policy | None, console: Any) -> None:
        self.path = path
        self.live = LiveRun(policy)
        self._console = console
        self._events = Tail(path)
        self._metrics = Tail(path_next_to(path), last_bytes=_METRICS_BYTES)
        self._quiet_since = time.monotonic()

    @property
    def exists(self) -> bool:
        """Whether the events file exists."""
        return self._events.exists

    def print(self, line: str, *, severe: bool = False) -> None:
        """Prints one line."""
        from rich.text import Text

        # Text, because rich interprets brackets in a str as markup. soft_wrap keeps one line.
        text = Text(one_line(line), style="bold red" if severe else "")
        self._console.print(text, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.file.flush()

    def print_state(self) -> None:
        """Prints the state of the run."""
        for line in state_lines(self.live):
            self.print(line)

    def catch_up(self) -> None:
        """Reads the whole file and prints its last events. Raises WatchError for a wrong file."""
        lines: deque[tuple[str, bool]] = deque(maxlen=_EARLIER_LINES)
        count = 0
        for line in self._new_lines():
            lines.append(line)
            count += 1
        if count > len(lines):
            self.print(f"({count - len(lines)} earlier lines, see healcore events show)")
        for line, severe in lines:
            self.print(line, severe=severe)

    def poll(self) -> None:
        """Prints the new events. Raises WatchError for a wrong file."""
        for line, severe in self._new_lines():
            self.print(line, severe=severe)

    def ended(self) -> bool:
        """Whether the run has ended or its process is gone."""
        if self.live.ending is not None:
            return True
        now = time.monotonic()
        if now - self._quiet_since < _CHECK_AFTER:
            return False
        self._quiet_since = now
        if not self.live.check_process():
            return False
        self.poll()  # the process may have written `end` before it ended
        if self.live.check_process():
            self.print("the process was killed: it wrote no end event", severe=True)
        return True

    def _new_lines(self) -> Iterator[tuple[str, bool]]:
        """Iterates over the lines of new events, and whether each is severe."""
        for event in self._new_events():
            line = event_line(event)
            if line is not None:
                yield line, event.kind in SEVERE
        more = True
        while more:
            lines, _, more = self._metrics.poll()
            for line in lines:
                self._quiet_since = time.monotonic()
                self.live.add_metrics(line)

    def _new_events(self) -> Iterator[EventRecord]:
        more = True
        while more:
            lines, replaced, more = self._events.poll()
            if replaced:
                self.print(f"{self.path.name} was emptied or replaced", severe=True)
            if lines:
                self._quiet_since = time.monotonic()
            for line in lines:
                event = self.live.add_event(line)
                if event is not None:
                    if event.kind == "end":
                        written, _ = read_postmortem(self.path, event.run)
                        self.live.run.add_postmortem(written or {})
                    yield event
            if self._events.error_text:
                raise WatchError(self._events.error_text)
            count = self.live.lines
            if self.live.damaged == count >= _MAX_DAMAGED:
                raise WatchError(
                    f"{self.path} is not an events file: its first {count} lines are not events. "
                    "Name the file of logging=Logging(events=...) of the Healer or callback"
                )


def print_once(path: Path, policy: Policy | None, console: Any) -> int:
    """Prints the state of a run. Returns the exit status. Raises WatchError for a wrong file."""
    watcher = RunWatcher(path, policy, console)
    watcher.catch_up()
    if not watcher.exists:
        raise WatchError(f"{path} does not exist")
    live = watcher.live
    if live.lines == live.damaged:
        raise WatchError(f"{path} has no event ({live.lines} lines)")
    live.check_process()
    watcher.print_state()
    return FAILED if live.failed else COMPLETED


def follow(path: Path, policy: Policy | None, console: Any, *, forever: bool = False) -> int:
    """Follows a run to its end and returns the exit status.

    With `forever` it waits for restarts of the run. Raises WatchError for a wrong file.
    """
    watcher = RunWatcher(path, policy, console)
    with _panel_below(console, watcher) as refresh:
        if not path.exists():
            watcher.print(f"{path} {_WAITING}")
        watcher.catch_up()
        while forever or not watcher.ended():
            refresh()
            time.sleep(_POLL_INTERVAL)
            watcher.poll()
        refresh()
    if not console.is_terminal:  # a terminal shows the state in the panel
        watcher.print_state()
    return FAILED if watcher.live.failed else COMPLETED


@contextmanager
def _panel_below(console: Any, watcher: RunWatcher) -> Iterator[Callable[[], None]]:
    if not console.is_terminal:
        yield lambda: None
        return
    from rich.live import Live

    with Live(_panel(watcher), console=console, auto_refresh=False) as live:
        yield lambda: live.update(_panel(watcher), refresh=True)


def _panel(watcher: RunWatcher) -> Any:
    from rich.panel import Panel
    from rich.text import Text

    live = watcher.live
    colour = "red" if live.failed else "green" if live.ending else "cyan"
    lines = state_lines(live) if watcher.exists else [f"{watcher.path} {_WAITING}"]
    text = Text("\n".join(lines))
    return Panel(text, title=Text(one_line(str(watcher.path))), border_style=colour)
