"""The guard's own process: it reads a heartbeat, and acts when a step takes too long.

It is started by `hang_guard`, gets its settings on standard input, and ends when the training
process is gone. It is no child of that process, whose program may wait for its own children. It
imports the standard library only, and that without site-packages, so that it starts in a few
milliseconds and takes a few megabytes.
"""

from __future__ import annotations

import os
import signal
import sys
import time

from healcore.runtime.hang_guard.alarm import Alarm
from healcore.runtime.hang_guard.heartbeat import Heartbeat
from healcore.runtime.hang_guard.meeting_folder import MeetingFolder
from healcore.runtime.hang_guard.settings import Settings
from healcore.runtime.hang_guard.watched_process import WatchedProcess

_GROWTH = 3.0
"""A step may take this many times the longest so far."""
_LATE_S = 1.0
"""Seconds by which a look may be late, at most; more is time in which this process slept too."""

_LINGER_S = 5.0
"""Seconds within which the other guards have read the verdict."""


class Guard:
    """Watches one process until that has ended."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._heartbeat = Heartbeat(settings.heartbeat)
        self._process = WatchedProcess(settings)
        self._look_s = min(max(settings.timeout_s / 20, 0.02), 1.0)
        # A look at a directory that may be on another machine, so not as often.
        self._exchange_s = min(max(settings.timeout_s / 20, self._look_s), 30.0)
        self._number = 1
        self._since: int | None = None
        self._waited = self._alarm_at = 0.0

    def run(self) -> None:
        """Returns when the process has ended."""
        looked = met = time.monotonic()
        while not self._process.gone(within=self._look_s):
            now = time.monotonic()
            # A suspended job (Ctrl-Z, a paused container) suspends the guard too, and no time has
            # passed for it.
            self._count(min(now - looked, self._look_s + _LATE_S))
            looked = now
            alarm = Alarm(self._settings, self._number)
            if self._waited > max(self._limit, self._alarm_at):
                if self._process.traced():
                    self._since = None  # a debugger holds it
                    continue
                alarm.raise_it()
            elif self._settings.world == 1 or now < met + self._exchange_s:
                continue
            met = now
            if alarm.raised() and self._answer(alarm):
                self._process.end()
                return

    @property
    def alarms(self) -> int:
        """Alarms so far."""
        return self._number - 1

    @property
    def _limit(self) -> float:
        settings, heartbeat = self._settings, self._heartbeat
        first = 0.0 if heartbeat.has_stepped else settings.first_step_s
        return max(settings.timeout_s, first, _GROWTH * heartbeat.longest_s)

    def _count(self, seconds: float) -> None:
        """Counts the time within one step, and any time of a process that a signal has stopped."""
        since = self._heartbeat.since or (-1 if self._process.stopped() else 0)
        if since != self._since:
            self._since, self._waited, self._alarm_at = since, 0.0, 0.0
        elif since:
            self._waited += seconds

    def _answer(self, alarm: Alarm) -> bool:
        """Takes part in an alarm; whether the run is to be ended."""
        if self._process.stopped():
            # For its stacks it has to run for a moment, which the others would take for progress.
            alarm.wait_for(self._settings.world - 1, self._exchange_s)
        mine = alarm.evidence(self._process, self._heartbeat, waits_s=self._waited)
        made = alarm.agreed(mine, self._process, self._exchange_s)
        self._number += 1
        self._alarm_at = 2 * self._waited
        return made.ends


def main() -> None:
    """Runs the guard with the settings on standard input."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)  # they go to the whole process group
    settings = Settings.loads(sys.stdin.buffer.read())
    guard = Guard(settings)
    if os.getppid() != settings.pid:
        return  # the training process was killed before
    child = os.fork()
    if child:
        print(child, flush=True)
        os._exit(0)
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    guard.run()
    if settings.removes and guard.alarms:
        time.sleep(_LINGER_S)
        MeetingFolder(settings.folder, settings.secret).remove()
