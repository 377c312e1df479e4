"""`EndRequests`: signals and a stop file ask a run to end, and several ranks end together.

After SIGTERM, Ctrl-C and SIGUSR1 (Slurm's `--signal=USR1@60`) the run finishes the current step and
saves. One handler serves all runs of the process. A program's own handler of Ctrl-C or SIGUSR1
stays, and a handler of SIGTERM from before the runs is called too. Schedulers repeat a signal, or
send SIGINT after SIGTERM: the run is ending already, so nothing else happens. A second Ctrl-C ends
the process at once, like a kill, because a KeyboardInterrupt would still wait for pending
checkpoints. In an interactive session, which must survive, it is a KeyboardInterrupt.

A request may reach one rank only. This rank must not end alone: the other ranks would wait for it
in their next collective. Instead it proposes the end. The driver marks the steps from then on
(`Driver.request_vote`; in torch a bit of the step's own all_reduce), and every rank reads the mark
with the step's record, `LAG` steps later. Then the ranks exchange their proposals once, and all of
them end.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import LAG, StepResult
from healcore.runtime.run.ending.exits import EndRequested, exit_for
from healcore.runtime.store.ranks import Ranks

_SIGNALS = [signal.SIGTERM, signal.SIGINT, *filter(None, [getattr(signal, "SIGUSR1", None)])]
"""The signals that ask a run to end. Windows has no SIGUSR1."""
_MAX_SLEEP_S = 0.1
"""Max seconds of one sleep, because a Python signal handler does not end a sleep."""


class EndRequests:
    """The requests to end one run, and the votes of its ranks on them.

    A request is the number of a signal, or the reason of another request as a text.

    Args:
        ranks: the ranks of the run. One rank alone ends without a vote.
        driver: marks the steps after a proposal, so that all ranks know of it at the same step.
        stop_file: a file by which a person or a scheduler asks the run to end, or None. It is not
            removed, so that it ends all programs of a queue.

    Attributes:
        ends_together: whether the ranks have agreed to end after this step.
        signal_number: number of the signal that asks the run to end, or None without one.
        stop_reason: the stop file as the reason of the end.
    """

    def __init__(self, ranks: Ranks, driver: Driver, stop_file: str | os.PathLike[str] | None):
        self._ranks = ranks
        self._driver = driver
        self.ends_together = False
        self.signal_number: int | None = None
        self.stop_path: Path | None = None
        if stop_file is not None:
            self.stop_path = Path(stop_file).absolute()  # the program may change its directory
        self.stop_reason = f"the stop file {self.stop_path}"
        self._pid = 0
        """The process that watches signals. A forked child has the handlers, but not the run."""
        self._waits_for_data = False
        self._proposals: list[int | str] = []
        """The requests to this rank, which the next vote exchanges."""
        self._vote_at: int | None = None
        """Number of steps done at which the next vote is due, or None."""

    @property
    def stop_file_found(self) -> bool:
        """Whether the stop file exists. It is looked for at each step."""
        return self.stop_path is not None and os.path.lexists(self.stop_path)

    # -- the end of this rank -------------------------------------------------------------------

    def raise_or_propose(self, *, may_end: bool) -> None:
        """Raises the exception that ends the run if it was requested; with votes proposes the end.

        Args:
            may_end: whether the state can be saved now, so that a rank may end alone.

        Raises:
            EndRequested: the stop file exists.
            Terminated: a signal has asked for the end.
            Interrupted: Ctrl-C has asked for the end.
        """
        if self._ranks.world > 1:  # the next step brings the vote
            if self.stop_file_found and self.stop_reason not in self._proposals:
                self.propose(self.stop_reason)
        elif may_end:
            self.raise_if_alone()
            if self.stop_file_found:
                raise EndRequested(self.stop_reason)

    def raise_if_alone(self) -> None:
        """Raises the exception of a received signal, unless all ranks end together.

        Raises:
            Terminated: after SIGTERM or SIGUSR1.
            Interrupted: after Ctrl-C.
        """
        if self.signal_number is not None and self._ranks.world == 1:
            raise exit_for(self.signal_number)

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """A context in which a signal, also an earlier signal, ends a run of one process at once.

        A loader may wait for minutes, and the end of the step would come too late for a scheduler
        that kills the process after a grace period. With several ranks the signal still waits for
        their vote.

        Raises:
            Terminated: after SIGTERM or SIGUSR1.
            Interrupted: after Ctrl-C.
        """
        self._waits_for_data = True
        try:
            self.raise_if_alone()
            yield
        finally:
            self._waits_for_data = False

    def sleep(self, seconds: float) -> None:
        """Sleeps, in any thread. A signal ends the sleep, as `raise_if_alone` does.

        Args:
            seconds: how long, unless a signal ends the sleep.
        """
        until = time.monotonic() + seconds
        self.raise_if_alone()
        while time.monotonic() < until:
            time.sleep(min(seconds, _MAX_SLEEP_S))
            self.raise_if_alone()

    # -- the votes of several ranks -------------------------------------------------------------

    def propose(self, request: int | str) -> None:
        """Proposes the end to all ranks, from the training thread or its signal handler.

        Args:
            request: why the run should end. All ranks end a few steps later.
        """
        self._proposals.append(request)
        self._driver.request_vote()

    def note_mark(self, result: StepResult) -> None:
        """Schedules a vote if a step is marked. Called for each step whose records are read.

        The vote is due `LAG` steps after the first marked step on every rank. A rank that evaluates
        alone reads the mark earlier than the other ranks, and would otherwise vote alone. After a
        rollback the first repeated step is marked, because the driver marks each step until the
        vote.

        Args:
            result: the step that was read.
        """
        if result.vote_requested:
            vote_at = result.index + 1 + LAG
            if self._vote_at is None:
                self._vote_at = vote_at
            else:
                self._vote_at = min(vote_at, self._vote_at)

    def vote_when_due(self, step: int, log: RunLog) -> None:
        """Exchanges the proposals if a vote is due. Collective when it is.

        Args:
            step: steps done.
            log: gets the event of the vote, with the proposals of all ranks.

        Raises:
            EndRequested: the ranks end together, because of a stop file.
            Terminated: the same, because of a signal.
            Interrupted: the same, because of Ctrl-C.
        """
        if self._vote_at is None or step < self._vote_at:
            return
        self.ends_together = True
        for rank, requests in enumerate(self._ranks.gather(self._proposals)):
            for request in requests:
                if isinstance(request, str):
                    name = request
                else:
                    name = signal.Signals(request).name
                log.note(step, f"the ranks end together, as rank {rank} was asked to: {name:.500}")
                raise exit_for(request)

    # -- signals --------------------------------------------------------------------------------

    def watch_signals(self) -> bool:
        """Installs the handler of signals. Called once, when the run begins.

        Returns:
            Whether signals are watched. In another thread than the main thread Python permits no
            handlers, so a signal has its usual effect, without a save.
        """
        if threading.current_thread() is not threading.main_thread():
            return False
        for number in _SIGNALS:
            current = signal.getsignal(number)
            if current in (_handle, signal.default_int_handler, signal.SIG_DFL) or (
                number == signal.SIGTERM
            ):
                _install(number, _handle)
        self._pid = os.getpid()
        _watching.append(self)
        return True

    def stop_watching(self) -> None:
        """Ends the watch. The last run of the process restores the handlers from before the runs.

        A handler stays if it was replaced, or if another thread calls: it then has no effect.
        """
        if self in _watching:
            _watching.remove(self)
        if _open_runs() or threading.current_thread() is not threading.main_thread():
            return
        for number, handler in _previous.items():
            if signal.getsignal(number) in (_handle, signal.SIG_DFL):
                signal.signal(number, handler)
        _previous.clear()


_watching: list[EndRequests] = []
"""The runs that watch signals."""
_previous: dict[int, Any] = {}
"""Signal -> handler from before the first open run."""


def _open_runs() -> list[EndRequests]:
    """The runs of this process that watch signals, without the runs of a parent process."""
    return [each for each in _watching if each._pid == os.getpid()]


def _install(number: int, handler: Any) -> None:
    """Installs a handler for a signal until the last run ends."""
    current = signal.signal(number, handler)
    if current is not _handle:
        _previous.setdefault(number, current)


def _handle(number: int, frame: FrameType | None) -> None:
    """Handles a signal: asks the runs to end that had none before.

    Called by Python between two bytecodes of the main thread, wherever the program is. A run that
    was left open has perhaps had its signal already, and does not keep a later run from saving.
    """
    runs = _open_runs()
    if not runs:  # the program has kept this handler: the signal has its usual effect
        signal.signal(number, _previous.pop(number, signal.SIG_DFL))
        os.kill(os.getpid(), number)
        return
    # A scheduler signals the whole process group. torch's SIGCHLD handler raises anywhere when its
    # workers die, which would interrupt the save.
    if hasattr(signal, "SIGCHLD"):
        _install(signal.SIGCHLD, signal.SIG_DFL)
    asked = [each for each in runs if each.signal_number is None]
    for each in asked:
        each.signal_number = number
        if each._ranks.world > 1:
            each.propose(number)
    previous = _previous.get(number)
    if number == signal.SIGINT:
        signal.signal(number, previous if hasattr(sys, "ps1") else signal.SIG_DFL)
        os.write(2, b"\nhealcore: finishing the step; Ctrl-C again stops at once\n")
    elif asked and callable(previous):
        previous(number, frame)
    for each in asked:
        if each._waits_for_data:
            each.raise_if_alone()
