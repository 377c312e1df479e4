"""Follows a run as its files grow, in a terminal or a pipe."""

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
from healcore.events.metrics import path_next_to
from healcore.events.models import EventRecord
from healcore.events.schema import SEVERE
from healcore.policy import Policy
from healcore.tools.watch.live_run import LiveRun, event_line, one_line, state_lines

COMPLETED, FAILED = 0, 1
"""Exit statuses."""

_LOOK_EVERY = 0.5
"""Seconds between looks; the Healer writes its metrics as often."""
_GONE_EVERY = 3.0
"""Seconds without a new line after which the process is checked."""
_HISTORY = 20
"""Most earlier lines that are printed at the start."""
_METRICS_END = 1 << 16
"""Bytes of the metrics that are read at the start."""
_FOREIGN = 20
"""Lines without an event after which the file is rejected."""
_BLOCK = 1 << 20
_LONGEST = 1 << 24
"""Bytes; a longer line is damaged and is dropped."""


class WatchError(HealcoreError, ValueError):
    """A file that cannot be watched."""


class NewLines(NamedTuple):
    """The lines added to a file since the last look."""

    lines: list[bytes]
    """Whole lines, without their ends."""
    replaced: bool
    """The file was replaced or emptied: the lines are from the beginning."""
    more: bool
    """More lines can be read at once."""


class Tail:
    """Reads a growing file. The file may not exist yet, and may be rotated or emptied.

    An incomplete line is buffered. `last` limits the first read to that many bytes at the end of
    the file. After a look, `there` is whether the file exists, and `error_text` why it could not be
    read, or an empty string.
    """

    def __init__(self, path: Path, *, last: int | None = None) -> None:
        self.path = path
        self.there = False
        self.error_text = ""
        self._last = last
        self._identity: tuple[int, int] | None = None
        self._place = 0
        self._rest = b""

    def look(self) -> NewLines:
        """Reads the new lines. Does not raise: see `there` and `error_text`."""
        self.error_text = ""
        try:
            with open(self.path, "rb", opener=regular_file.opener) as file:
                self.there = True
                return self._read(file, os.fstat(file.fileno()))
        except FileNotFoundError:
            self.there = False
        except OSError as error:
            self.error_text = f"{self.path}: {error.strerror or error}"
        return NewLines([], False, False)

    def _read(self, file: BinaryIO, stat: os.stat_result) -> NewLines:
        identity = (stat.st_dev, stat.st_ino)
        known = self._identity is not None
        replaced = identity != self._identity or stat.st_size < self._place
        if replaced:
            self._identity, self._rest, self._place = identity, b"", 0
            if self._last is not None and stat.st_size > self._last:
                self._place = stat.st_size - self._last
                file.seek(self._place)
                self._place += len(file.readline())  # the rest of a line
        file.seek(self._place)
        block = file.read(_BLOCK)
        self._place += len(block)
        *lines, self._rest = (self._rest + block).split(b"\n")
        if len(self._rest) > _LONGEST:
            lines, self._rest = [*lines, self._rest[:80]], b""
        return NewLines(lines, replaced and known, len(block) == _BLOCK)


class RunWatcher:
    """Prints new events of a file that may not exist yet, and reads its metrics."""

    def __init__(self, path: Path, policy: Policy | None, console: Any) -> None:
        self.path = path
        self.live = LiveRun(policy)
        self._console = console
        self._events = Tail(path)
        self._metrics = Tail(path_next_to(path), last=_METRICS_END)
        self._quiet_since = time.monotonic()

    @property
    def there(self) -> bool:
        """Whether the file exists."""
        return self._events.there

    def print(self, line: str, *, severe: bool = False) -> None:
        """Prints one line."""
        from rich.text import Text

        # Text, because rich reads brackets in a str as markup. soft_wrap: one line stays one line.
        text = Text(one_line(line), style="bold red" if severe else "")
        self._console.print(text, soft_wrap=True)
        if not self._console.is_terminal:
            self._console.file.flush()

    def print_state(self) -> None:
        """Prints the state of the run."""
        for line in state_lines(self.live):
            self.print(line)

    def catch_up(self) -> None:
        """Reads the whole file and prints its last lines. Raises WatchError for another file."""
        lines: deque[tuple[str, bool]] = deque(maxlen=_HISTORY)
        count = 0
        for line in self._new_lines():
            lines.append(line)
            count += 1
        if count > len(lines):
            self.print(f"({count - len(lines)} earlier lines: healcore events show)")
        for line, severe in lines:
            self.print(line, severe=severe)

    def look(self) -> None:
        """Prints the new lines. Raises as `catch_up`."""
        for line, severe in self._new_lines():
            self.print(line, severe=severe)

    def ended(self) -> bool:
        """Whether the run has ended or its process is gone."""
        if self.live.ending is not None:
            return True
        now = time.monotonic()
        if now - self._quiet_since < _GONE_EVERY:
            return False
        self._quiet_since = now
        if not self.live.check_process():
            return False
        self.look()  # the end may have been written meanwhile
        if self.live.check_process():
            self.print("the process is gone without an end event: it was killed", severe=True)
        return True

    def _new_lines(self) -> Iterator[tuple[str, bool]]:
        """Lines of new events, and whether each is severe."""
        for event in self._new_events():
            line = event_line(event)
            if line is not None:
                yield line, event.kind in SEVERE
        more = True
        while more:
            lines, _, more = self._metrics.look()
            for line in lines:
                self._quiet_since = time.monotonic()
                self.live.add_metrics(line)

    def _new_events(self) -> Iterator[EventRecord]:
        more = True
        while more:
            lines, replaced, more = self._events.look()
            if replaced:
                self.print(f"{self.path.name} was emptied or replaced: from its start", severe=True)
            if lines:
                self._quiet_since = time.monotonic()
            for line in lines:
                event = self.live.add_event(line)
                if event is not None:
                    yield event
            if self._events.error_text:
                raise WatchError(self._events.error_text)
            seen, damaged = self.live.seen, self.live.damaged
            if damaged == seen >= _FOREIGN:
                raise WatchError(
                    f"{self.path} is no events file: its first {seen} lines are not events. "
                    "Name the file that the argument events= writes (of Healer, heal or a callback)"
                )


def print_once(path: Path, policy: Policy | None, console: Any) -> int:
    """Prints the state of a run. Returns the exit status. Raises WatchError without an event."""
    watcher = RunWatcher(path, policy, console)
    watcher.catch_up()
    if not watcher.there:
        raise WatchError(f"{path} is not there")
    live = watcher.live
    if live.seen == live.damaged:
        raise WatchError(f"{path} has no event in it ({live.seen} lines)")
    live.check_process()
    watcher.print_state()
    return FAILED if live.failed else COMPLETED


def follow(path: Path, policy: Policy | None, console: Any, *, forever: bool = False) -> int:
    """Follows a run to its end and returns the exit status.

    With `forever` it waits for restarts of the run. Raises WatchError if the file is no events file
    or cannot be read.
    """
    watcher = RunWatcher(path, policy, console)
    with _panel_below(console, watcher) as refresh:
        if not path.exists():
            watcher.print(f"waiting for {path}")
        watcher.catch_up()
        while forever or not watcher.ended():
            refresh()
            time.sleep(_LOOK_EVERY)
            watcher.look()
        refresh()
    if not console.is_terminal:  # in a terminal the panel stays
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
    lines = state_lines(live) if watcher.there else [f"waiting for {watcher.path}"]
    text = Text("\n".join(lines))
    return Panel(text, title=Text(one_line(str(watcher.path))), border_style=colour)
