"""`EndRequests`: the requests to end a run, and the votes of the ranks on them.

A signal or a stop file may reach one rank only. This rank must not end alone: the other ranks would
wait for it in their next collective. Instead it makes a proposal:

    self.propose(Proposal("signal 15", signal=15))

The driver marks the steps from then on (`Driver.request_vote`; in torch a bit of the step's own
all_reduce), and every rank reads the mark with the step's record, `LAG` steps later. Then the ranks
exchange their proposals once, and all of them end.
"""

from __future__ import annotations

from typing import NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.reporting.run_log import RunLog
from healcore.runtime.run.dispatch_queue import LAG, StepResult
from healcore.runtime.run.ending.exits import EndRequested, exit_for
from healcore.runtime.run.ending.signal_watch import SignalWatch
from healcore.runtime.run.ending.stop_file import StopFile
from healcore.runtime.store.ranks import Ranks


class Proposal(NamedTuple):
    """Proposal of one rank that all ranks save their last state and end.

    The ranks exchange their proposals in a vote, so that all of them end after the same step. A
    rank that ended alone would leave the other ranks waiting for it.
    """

    why: str
    """The source of the request, for the log: "signal 15", or the path of the stop file."""
    signal: int | None = None
    """Number of the signal that asks the run to end, or None for another reason."""


class EndRequests:
    """The requests to end a run, by signals and the stop file, and the votes of the ranks on them.

    Args:
        ranks: the ranks of the run. One rank alone ends without a vote.
        driver: marks the steps after a proposal, so that all ranks know of it at the same step.

    Attributes:
        ends_together: whether the ranks have agreed to end after this step.
        stop_file: the file whose existence asks for the end.
        stop_signals: the signals that the process has received.
    """

    def __init__(self, ranks: Ranks, driver: Driver, stop_file: StopFile) -> None:
        self.ends_together = False
        self.stop_file = stop_file
        self.stop_signals = SignalWatch()
        if ranks.world > 1:
            self.stop_signals = SignalWatch(self._propose_by_signal)
        self._ranks = ranks
        self._driver = driver
        self._pending: list[Proposal] = []
        """The proposals of this rank, which the next vote exchanges."""
        self._due_at: int | None = None
        """Number of steps done at which the next vote is due, or None."""

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
            proposal = Proposal(self.stop_file.why)
            if self.stop_file.found and proposal not in self._pending:
                self.propose(proposal)
        elif may_end:
            self.stop_signals.raise_if_alone()
            if self.stop_file.found:
                raise EndRequested(self.stop_file.why)

    def propose(self, proposal: Proposal) -> None:
        """Makes a proposal to all ranks, from the training thread or its signal handler.

        Args:
            proposal: why the run should end. All ranks end a few steps later.
        """
        self._pending.append(proposal)
        self._driver.request_vote()

    def _propose_by_signal(self, number: int) -> None:
        """Proposes the end because of a signal."""
        self.propose(Proposal(f"signal {number}", signal=number))

    def note_mark(self, result: StepResult) -> None:
        """Schedules a vote if a step is marked. Called for each step whose records are read.

        The vote is due `LAG` steps after the marked step on every rank. A rank that evaluates alone
        reads the mark earlier than the other ranks, and would otherwise vote alone.

        Args:
            result: the step that was read. Steps that are marked while a vote is due change
                nothing.
        """
        if result.vote_requested and self._due_at is None:
            self._due_at = result.index + 1 + LAG

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
        if self._due_at is None or step < self._due_at:
            return
        of_ranks: list[list[Proposal]] = self._ranks.gather(self._pending)
        proposals: list[Proposal] = []
        listed, reasons = [], []
        for rank, of_rank in enumerate(of_ranks):
            for each in of_rank:
                proposals.append(each)
                listed.append({"rank": rank, "outcome": "end", "why": each.why})
                reasons.append(f"rank {rank}: {each.why}")
        first = proposals[0]
        log.event("vote", step=step, outcome="end", why=first.why, of_ranks=listed)
        log.info(f"step {step}: the ranks end together ({', '.join(reasons):.500})")
        self.ends_together = True
        if first.signal is not None:
            raise exit_for(first.signal)
        raise EndRequested(first.why)

    def on_rollback(self) -> None:
        """Forgets the mark of an undone step, and with it the step of the vote.

        No request is lost: the driver marks each step until the vote, so the first repeated step
        brings the mark again.
        """
        self._due_at = None
