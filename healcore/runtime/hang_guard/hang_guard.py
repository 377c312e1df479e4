"""The training process's side: starts the guard, and writes when the time counts."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import healcore
from healcore.policy.faults import Hang
from healcore.runtime.events import Log
from healcore.runtime.events.process import machine
from healcore.runtime.hang_guard import process_signals
from healcore.runtime.hang_guard.heartbeat import SIZE, Heartbeat
from healcore.runtime.hang_guard.meeting_folder import MeetingFolder
from healcore.runtime.hang_guard.settings import Settings
from healcore.runtime.store.ranks import Ranks

_LONGEST_DELAY_S = 10.0
"""Seconds until the guard is started, at most: a run that is over by then has none."""

_END_S = 5.0
"""Seconds that the end of a run waits for the guard's."""

_PROGRAM = (
    "import sys; sys.path.append(sys.argv[1]); "
    "from healcore.runtime.hang_guard.guard import main; main()"
)


class HangGuard:
    """The guard of this process. Before `start`, and where none can work, it does nothing.

    Time counts from `watch` or `resume` to `pause`, and from 0 again with each `watch`.
    """

    def __init__(self) -> None:
        self.heartbeat: Heartbeat | None = None
        self._memory = -1
        self._settings: Settings | None = None
        self._timer: threading.Timer | None = None
        self._guard = -1
        """Descriptor of the guard's process."""
        self._lock = threading.Lock()
        self._closed = False
        self._do_nothing()

    def start(self, rule: Hang, *, ends: bool, observes: bool, ranks: Ranks, events: Log) -> None:
        """Starts it. Every rank calls this at the same place: rank 0 says where they will meet.

        Args:
            rule: of the policy.
            ends: whether the policy ends a run that hangs.
            observes: whether the policy only observes.
            ranks: of the run.
            events: of this rank.
        """
        path = None if events.path is None else str(events.path)
        secret, meeting = secrets.token_hex(32), f"healcore.hang.{secrets.token_hex(8)}"
        of_ranks = ranks.gather(
            (
                machine(),
                path,
                events.follow_links,
                events.run,
                secret,
                tempfile.gettempdir(),
                meeting,
            )
        )
        host, path, follow_links, run, secret, local, meeting = of_ranks[0]
        if not process_signals.supported():
            return
        self._memory = os.memfd_create("healcore-heartbeat")
        os.ftruncate(self._memory, SIZE)
        self.heartbeat = beat = Heartbeat(self._memory)
        self.watch, self.resume, self.stepped = beat.watch, beat.resume, beat.stepped
        self.pause = beat.watch if rule.between_steps else beat.pause
        installed = process_signals.install()
        one_machine = all(each[0] == host for each in of_ranks)
        # A local folder cannot hang.
        parent = local if path is None or one_machine else os.path.dirname(path)
        settings = Settings(
            pid=os.getpid(),
            thread=threading.get_ident(),
            rank=ranks.rank,
            world=ranks.world,
            heartbeat=self._memory,
            stacks=installed.stacks,
            dump=installed.dump,
            folder=os.path.join(parent, meeting),
            secret=secret,
            removes=one_machine and ranks.rank == 0,
            events=path,
            follow_links=follow_links,
            run=run,
            timeout_s=rule.timeout_s,
            first_step_s=rule.first_step_s,
            confirm=rule.confirm,
            ends=ends,
            observes=observes,
            path=tuple(sys.path),
        )
        self._settings = settings
        delay = min(rule.timeout_s / 20, _LONGEST_DELAY_S)
        self._timer = threading.Timer(delay, self._start, [settings])
        self._timer.daemon = True
        self._timer.start()

    def _start(self, settings: Settings) -> None:
        root = Path(healcore.__file__).parents[1]
        # -S: no site-packages, whose .pth files may import anything.
        command = [sys.executable, "-I", "-S", "-c", _PROGRAM, str(root)]
        with self._lock, contextlib.suppress(OSError, subprocess.TimeoutExpired):
            if self._closed:
                return
            starter = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=(settings.heartbeat, settings.stacks),
            )
            assert starter.stdin is not None
            assert starter.stdout is not None
            with starter.stdin as given:
                given.write(settings.dumps())
            with starter.stdout as answer:
                pid = answer.readline()
            starter.wait(_END_S)
            if pid:
                self._guard = os.pidfd_open(int(pid))
            if self._closed:  # while it was being started
                self._end()

    def on_step(self) -> None:
        """Called by the driver when an optimizer has stepped: what follows may take any time."""
        if self.heartbeat is not None:
            self.heartbeat.first_step_done()
        self.pause()

    def _do_nothing(self) -> None:
        self.watch = self.resume = self.pause = lambda: None
        self.stepped = lambda step: None

    def close(self) -> None:
        """Ends the guard."""
        if self._timer is not None:
            self._timer.cancel()
        self._closed = True
        # Not for ever: a process that was forked while the guard is being started, such as a worker
        # of a loader, has a copy of the pipe by which Popen learns that it has started.
        if self._lock.acquire(timeout=_END_S):
            self._end()
            self._lock.release()
        self._do_nothing()
        self.heartbeat = None
        if self._memory >= 0:
            os.close(self._memory)
            self._memory = -1

    def _end(self) -> None:
        """Ends the guard's process, if there is one."""
        if self._guard < 0:
            return
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._guard, signal.SIGKILL)
        ended = select.poll()
        ended.register(self._guard, select.POLLIN)
        ended.poll(_END_S * 1000)  # a dead disk may hold it
        os.close(self._guard)
        self._guard = -1
        if self._settings is not None and self._settings.removes:
            MeetingFolder(self._settings.folder, self._settings.secret).remove()
