"""The loop that follows a run, for a terminal and for a pipe."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from healcore.core.errors import HealcoreError
from healcore.policy import Policy
from healcore.runtime.events.metrics import path_next_to
from healcore.runtime.events.models import EventRecord
from healcore.tools.watch import status, wording
from healcore.tools.watch.state import LiveRun
from healcore.tools.watch.tail import Tail

COMPLETED, FAILED, UNUSABLE = 0, 1, 2

LOOK_EVERY = 0.5
"""Seconds; the Healer writes its metrics as often."""
_GONE_EVERY = 3.0
"""Seconds without news after which it is asked whether the process is still there."""
_HISTORY = 20
"""Lines of the past that are shown at the start."""
_METRICS_END = 1 << 16
"""Bytes of the metrics that are read at the start."""
_FOREIGN = 20
"""Lines without one event among them after which a file is taken to be something else."""


class WatchError(HealcoreError, ValueError):
    """A file that cannot be watched."""


class Watch:
    """One events file, and the metrics beside it.

    Args:
        path: the events file; it need not be there yet.
        policy: of the run, for its budget.
        report: takes a line, and whether it is grave.
    """

    def __init__(
        self, path: Path, *, policy: Policy | None, report: Callable[[str, bool], None]
    ) -> None:
        self.path = path
        self.live = LiveRun(policy)
        self._report = report
        self._events = Tail(path)
        self._metrics = Tail(path_next_to(path), last=_METRICS_END)
        self._quiet_since = time.monotonic()

    @property
    def there(self) -> bool:
        """Whether the file is there."""
        return self._events.there

    def catch_up(self) -> None:
        """Reads everything that is there already, and reports only the last lines of it.

        Raises:
            WatchError: it is no events file.
        """
        lines: deque[tuple[str, bool]] = deque(maxlen=_HISTORY)
        count = 0
        for event in self._new():
            line = wording.line(event)
            if line is not None:
                lines.append((line, event.kind in wording.GRAVE))
                count += 1
        if count > len(lines):
            self._report(f"({count - len(lines)} earlier lines: healcore events show)", False)
        for line, grave in lines:
            self._report(line, grave)

    def look(self) -> None:
        """What has come since.

        Raises:
            WatchError: it is no events file.
        """
        for event in self._new():
            line = wording.line(event)
            if line is not None:
                self._report(line, event.kind in wording.GRAVE)

    def ended(self) -> bool:
        """Whether the run has ended, or its process is gone."""
        if self.live.ending is not None:
            return True
        now = time.monotonic()
        if now - self._quiet_since < _GONE_EVERY:
            return False
        self._quiet_since = now
        if not self.live.note_if_gone():
            return False
        self.look()  # it may have written its end just before it went
        if self.live.note_if_gone():
            self._report("the process is gone, and has written no end: it was killed", True)
        return True

    def _new(self) -> Iterator[EventRecord]:
        more = True
        while more:
            news = self._events.look()
            more = news.more
            if news.anew:
                self._report(f"{self.path.name} was emptied or replaced: from its beginning", True)
            if news.lines:
                self._quiet_since = time.monotonic()
            for line in news.lines:
                event = self.live.take(line)
                if event is not None:
                    yield event
            if self._events.trouble:
                raise WatchError(self._events.trouble)
            seen, damaged = self.live.seen, self.live.damaged
            if damaged == seen >= _FOREIGN:
                raise WatchError(
                    f"{self.path} is no events file: none of its first {seen} lines is an event. "
                    'Name the file that Healer(events="run.events.jsonl") writes'
                )
        more = True
        while more:
            news = self._metrics.look()
            more = news.more
            for line in news.lines:
                self._quiet_since = time.monotonic()
                self.live.take_metrics(line)


def once(path: Path, policy: Policy | None, console: Any) -> int:
    """Prints how a run stands.

    Raises:
        WatchError: there is no such file, or no event in it.
    """
    watch = Watch(path, policy=policy, report=lambda line, grave: _print(console, line, grave))
    watch.catch_up()
    if not watch.there:
        raise WatchError(f"{path} is not there")
    live = watch.live
    if live.seen == live.damaged:
        raise WatchError(f"{path} has no event in it ({live.seen} lines)")
    live.note_if_gone()
    for line in status.lines(live):
        _print(console, line, grave=False)
    return FAILED if live.failed else COMPLETED


def follow(path: Path, policy: Policy | None, console: Any, *, forever: bool = False) -> int:
    """Follows a run to its end.

    Args:
        path: the events file.
        policy: of the run, for its budget.
        console: rich's. No terminal: lines, and how the run stands at its end.
        forever: on after the end, since the run may be started again.

    Raises:
        WatchError: it is no events file, or cannot be read.
    """
    watch = Watch(path, policy=policy, report=lambda line, grave: _print(console, line, grave))
    with _live(console, watch) as refresh:
        if not path.exists():
            _print(console, f"waiting for {path}", grave=False)
        watch.catch_up()
        while forever or not watch.ended():
            refresh()
            time.sleep(LOOK_EVERY)
            watch.look()
        refresh()
    if not console.is_terminal:  # there the panel stays
        for line in status.lines(watch.live):
            _print(console, line, grave=False)
    return FAILED if watch.live.failed else COMPLETED


@contextmanager
def _live(console: Any, watch: Watch) -> Iterator[Callable[[], None]]:
    """The panel under the lines, where there is a terminal."""
    if not console.is_terminal:
        yield lambda: None
        return
    from rich.live import Live

    with Live(_panel(watch), console=console, auto_refresh=False) as live:
        yield lambda: live.update(_panel(watch), refresh=True)


def _panel(watch: Watch) -> Any:
    from rich.panel import Panel
    from rich.text import Text

    live = watch.live
    colour = "red" if live.failed else "green" if live.ending else "cyan"
    lines = status.lines(live) if watch.there else [f"waiting for {watch.path}"]
    text = Text("\n".join(lines))
    return Panel(text, title=Text(wording.plain(str(watch.path))), border_style=colour)


def _print(console: Any, line: str, grave: bool) -> None:
    from rich.text import Text

    # Text, not str: brackets in a log are no markup. One line stays one, however narrow a pipe.
    text = Text(wording.plain(line), style="bold red" if grave else "")
    console.print(text, soft_wrap=True)
    if not console.is_terminal:
        console.file.flush()
