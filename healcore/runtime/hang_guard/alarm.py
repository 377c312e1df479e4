"""One alarm: the guards of all ranks meet in a folder, and come to one verdict.

Files in it, after the number of the alarm: `alarm`, by which the first guard calls the others;
`rank<n>`, the evidence of each; `collector`, which is taken by the one that sums up; `verdict`.
Standard library only: the guard imports this file.
"""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from healcore.runtime.hang_guard.heartbeat import Heartbeat
from healcore.runtime.hang_guard.meeting_folder import MeetingFolder
from healcore.runtime.hang_guard.settings import Settings
from healcore.runtime.hang_guard.watched_process import WatchedProcess

_SAMPLES = 6
"""Stacks that are compared, to see whether a process moves."""
_MOVED_BYTES = 1 << 20
"""Bytes read and written between the first sample and the last that are a sign of work."""
_SLACK_S = 5.0
"""Seconds that the other guards get besides those that their part takes."""
_REPORT_S = 45.0
"""Seconds that the report may take: it imports healcore and writes two files."""
_LOOK_S = 0.05
_SHOWN = 8

_REPORT = (
    "import json, sys; given = json.load(sys.stdin); sys.path[:] = given['path']; "
    "from healcore.runtime.hang_guard.report import write; write(given)"
)


class Evidence(NamedTuple):
    """What one guard has found out about its process."""

    rank: int
    host: str
    pid: int
    step: int
    """Optimizer steps of the run."""
    first: bool
    """This process has not done a step."""
    within_step: bool
    """Its time counts: it is within a step, or waits for a batch."""
    waits_s: float
    """Seconds that have counted."""
    stopped: bool
    """A signal has stopped it."""
    moves: bool
    """Its stack changes, it reads or writes, or a person has it in a debugger."""
    stacks: str
    """The thread that trains first; where there are none, why."""


class Verdict(NamedTuple):
    """What follows from an alarm."""

    ends: bool
    why_not: str
    """Why the run is not ended although the policy says so, or ""."""


def verdict(settings: Settings, found: list[Evidence]) -> Verdict:
    """What the evidence of all ranks says.

    Time that does not count on one rank (its evaluation, its save) counts on none: the others only
    wait for it. With `confirm` the run is ended only if it is certain that nothing goes on: of
    several ranks, after the first step, which compiles, when all have answered and none moves.
    """
    if not settings.ends:
        return Verdict(False, "")
    stopped = any(each.stopped for each in found)
    busy = [each.rank for each in found if not each.within_step]
    if busy and not stopped:
        return Verdict(False, f"rank {listed(busy)} is not within a step")
    if not settings.confirm:
        return Verdict(True, "")
    if settings.world == 1:
        return Verdict(False, "it has one rank, for which nobody waits")
    missing = sorted({*range(settings.world)} - {each.rank for each in found})
    if missing:
        return Verdict(False, f"rank {listed(missing)} has not answered, and may not be in a step")
    if any(each.first for each in found):
        return Verdict(False, "it is the first step, which may compile")
    moving = [each.rank for each in found if each.moves]
    if moving:
        return Verdict(False, f"rank {listed(moving)} goes on with something")
    return Verdict(True, "")


class Alarm:
    """The alarm of this number; the first is 1."""

    def __init__(self, settings: Settings, number: int) -> None:
        self._settings, self._number = settings, number
        self._folder = MeetingFolder(settings.folder, settings.secret)
        self._is_mine = False

    @property
    def _window_s(self) -> float:
        """Seconds between the first sample and the last."""
        return min(max(self._settings.timeout_s / 10, 0.2), 30.0)

    def raised(self) -> bool:
        """Whether a guard of any rank has raised it: this one also where no other can learn it."""
        return self._is_mine or self._folder.get(self._name("alarm")) is not None

    def raise_it(self) -> None:
        """Calls the guards of all ranks."""
        self._is_mine = True
        with contextlib.suppress(OSError):
            self._folder.make()
        self._put("alarm", {"rank": self._settings.rank})

    def evidence(
        self, process: WatchedProcess, heartbeat: Heartbeat, *, waits_s: float
    ) -> Evidence:
        """What can be said about this rank, its stacks included."""
        settings, stopped = self._settings, process.stopped()
        # Before the stacks, for which a stopped process is continued.
        step, first, within_step = heartbeat.step, not heartbeat.has_stepped, heartbeat.since != 0
        before, stacks = process.transferred(), process.stacks()
        samples = [process.training_stack(stacks)]
        if settings.confirm and settings.ends and not stopped:
            pause = self._window_s / (_SAMPLES - 1)
            for _ in range(_SAMPLES - 1):
                time.sleep(pause)
                samples.append(process.training_stack(process.stacks()))
        # On a busy machine a stack may not be written to its end when it is read: the beginning of
        # another one is no change.
        longest = max(samples, key=len)
        changes = not all(longest.startswith(each) for each in samples)
        moved = process.transferred() - before > _MOVED_BYTES
        return Evidence(
            rank=settings.rank,
            host=socket.gethostname(),
            pid=settings.pid,
            step=step,
            first=first,
            within_step=within_step,
            waits_s=round(waits_s, 3),
            stopped=stopped,
            moves=changes or moved or process.in_debugger(stacks),
            stacks=stacks or f"it gave no Python stacks.\n{process.in_kernel()}",
        )

    def wait_for(self, guards: int, patience_s: float) -> None:
        """Waits until so many guards have written their evidence, but not for ever.

        Args:
            guards: how many.
            patience_s: seconds within which each of them looks for an alarm.
        """
        until = time.monotonic() + patience_s + self._window_s + _SLACK_S
        while len(self._found()) < guards and time.monotonic() < until:
            time.sleep(_LOOK_S)

    def agreed(self, mine: Evidence, process: WatchedProcess, patience_s: float) -> Verdict:
        """The verdict of all guards, once the events and the postmortem are written.

        Args:
            mine: the evidence of this rank.
            process: of this rank; once it is gone, only the guard that sums up goes on.
            patience_s: as in `wait_for`.
        """
        settings = self._settings
        self._put(f"rank{settings.rank}", mine._asdict())
        self.wait_for(settings.world, patience_s + 2 * _SLACK_S)  # a stopped one comes last
        first = min(each.rank for each in self._found() or [mine])
        until = time.monotonic() + _REPORT_S + 2 * _SLACK_S
        while True:
            made = self._made()
            if made is not None:
                return made
            # The others take over if the first one has ended in between.
            late = time.monotonic() - until
            if (settings.rank == first or late > 0) and (self._taken() or late > _REPORT_S):
                return self._sum_up(mine)
            if process.gone(within=_LOOK_S):
                return Verdict(False, "")

    def _sum_up(self, mine: Evidence) -> Verdict:
        found = self._found() or [mine]
        made = verdict(self._settings, found)
        self._report(found, made)
        self._put("verdict", made._asdict())
        return made

    def _report(self, found: list[Evidence], made: Verdict) -> None:
        settings = self._settings
        given = {
            "path": settings.path,
            "events": settings.events,
            "follow_links": settings.follow_links,
            "run": settings.run,
            "world": settings.world,
            "observes": settings.observes,
            "folder": settings.folder,
            "found": [each._asdict() for each in found],
            **made._asdict(),
        }
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            # -P: nothing is imported from the current directory.
            command = [sys.executable, "-P", "-c", _REPORT]
            writer = subprocess.Popen(command, stdin=subprocess.PIPE)
            # Left to itself after that: waiting for one that a dead disk holds would never end.
            writer.communicate(json.dumps(given).encode(), timeout=_REPORT_S)

    # -- the folder -----------------------------------------------------------------------------

    def _name(self, what: str) -> str:
        return f"{self._number}.{what}"

    def _found(self) -> list[Evidence]:
        found = [
            Evidence(**content)
            for name in self._folder.names()
            if name.startswith(self._name("rank"))
            and (content := self._folder.get(name)) is not None
        ]
        return sorted(found, key=lambda each: each.rank)

    def _made(self) -> Verdict | None:
        content = self._folder.get(self._name("verdict"))
        return None if content is None else Verdict(**content)

    def _taken(self) -> bool:
        """Whether this guard is the one that sums up."""
        return self._folder.take(self._name("collector"))

    def _put(self, what: str, content: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            self._folder.put(self._name(what), content)


def listed(ranks: Sequence[int]) -> str:
    """Numbers of ranks for a sentence, the first ones only."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return ", ".join(map(str, ranks[:_SHOWN])) + more
