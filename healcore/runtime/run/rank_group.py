"""`RankGroup`: all ranks act at the same step on an event that only one rank has seen.

A signal, a stop file or an unreadable batch reaches one rank only. This rank must not act alone:
the others would wait for it in their next collective. Instead it makes a proposal:

    loop.ranks.propose(Proposal("signal 15", ends=True, signal=15))

The driver marks the steps from then on (`Driver.request_vote`; in torch a bit of the step's own
all_reduce), and every rank reads the mark with the step's record, `LAG` steps later. Then the ranks
exchange their proposals once. If one rank proposes to end, all ranks end.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.run.steps import LAG, StepResult
from healcore.runtime.run.termination import EndRequested, StopFile, TerminationWatch, exit_for
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.story.run_log import RunLog

_MAX_REPORTS = 200
"""Max distinct lines that a rank reports: a failed disk may fail at every step."""


class Proposal(NamedTuple):
    """Proposal of one rank to all ranks."""

    why: str
    ends: bool = False  # whether the run ends and saves its last state; else rank 0 reports `why`
    signal: int | None = None  # the signal that asks the run to end, or None for another reason

    @property
    def outcome(self) -> str:
        """`end` or `report`, for the event."""
        return "end" if self.ends else "report"


class RankGroup:
    """The ranks of one run, and the requests to end it: signals and the stop file.

    Attributes:
        processes: The framework's ranks.
        votes: Whether the ranks vote. This requires several ranks and a driver that marks steps.
        ends_together: Whether the ranks have agreed to end after this step.
        termination: The received signals.
    """

    def __init__(
        self, ranks: Ranks, driver: Driver, stop_file: str | os.PathLike[str] | None = None
    ) -> None:
        self.processes = ranks
        self.rank, self.world, self.gather = ranks.rank, ranks.world, ranks.gather
        self.votes = ranks.world > 1 and driver.request_vote(False)
        self.ends_together = False
        self.stop_file = StopFile(stop_file)
        self.termination = TerminationWatch(self._propose_end if self.votes else None)
        self._driver = driver
        self._pending: list[Proposal] = []
        self._reported: set[str] = set()
        """Lines that this rank has written or reported."""
        self._due_at: int | None = None
        self._voted_at = 0
        self._proposed_end = False
        """Whether this rank has proposed to end because of the stop file."""

    def raise_if_asked(self, *, may_end: bool) -> None:
        """Raises the exception that ends the run if it was requested; with votes proposes the end.

        Args:
            may_end: whether the state can be saved now, so that a rank may end alone.
        """
        if self.votes:  # the next step brings the vote
            if self.stop_file.found and not self._proposed_end:
                self._proposed_end = True
                self.propose(Proposal(self.stop_file.why, ends=True))
        elif may_end:
            self.termination.raise_if_alone()
            if self.stop_file.found:
                raise EndRequested(self.stop_file.why)

    def propose(self, proposal: Proposal) -> None:
        """Makes a proposal to all ranks, from the training thread or its signal handler."""
        self._pending.append(proposal)
        self._driver.request_vote(True)

    def _propose_end(self, number: int) -> None:
        self.propose(Proposal(f"signal {number}", ends=True, signal=number))

    def report(self, text: str) -> None:
        """Reports a line to rank 0, which writes the events; repeated lines are dropped."""
        known = text in self._reported
        if len(self._reported) < _MAX_REPORTS:
            self._reported.add(text)
            if self.rank and not known:
                self.propose(Proposal(text))

    def read(self, step: StepResult) -> None:
        """Schedules a vote if a step is marked. Marks from before the last vote are outdated.

        The vote is due at a fixed step, because a rank that evaluates alone reads the mark earlier.
        """
        if step.vote_requested and self._due_at is None and step.index >= self._voted_at:
            self._due_at = step.index + 1 + LAG

    def vote_when_due(self, step: int, log: RunLog) -> None:
        """Votes if a vote is due after `step` steps. Raises the exception that ends the run."""
        if self._due_at is not None and step >= self._due_at:
            end = self.vote(step, log)
            if end is not None:
                raise EndRequested(end.why) if end.signal is None else exit_for(end.signal)

    def vote(self, step: int, log: RunLog) -> Proposal | None:
        """Exchanges proposals. Returns the lowest rank's proposal to end, or None. Collective."""
        self._due_at, self._voted_at = None, step
        mine, self._pending = self._pending, []
        of_ranks: list[list[Proposal]] = self.gather(mine)
        self._driver.request_vote(bool(self._pending))  # a signal may have come meanwhile
        known = self._reported if self.rank == 0 else ()  # all ranks may have seen the same
        found = [(rank, each) for rank, some in enumerate(of_ranks) for each in some]
        found = [(rank, each) for rank, each in found if each.ends or each.why not in known]
        if not found:
            return None
        end = next((each for _, each in found if each.ends), None)
        first = end or found[0][1]
        listed = [{"rank": n, "outcome": each.outcome, "why": each.why} for n, each in found]
        log.event("vote", step=step, outcome=first.outcome, why=first.why, of_ranks=listed)
        for rank, each in found:
            if not each.ends:
                log.warning(f"step {step}: rank {rank}: {each.why:.600}")
        if end is not None:
            reasons = ", ".join(f"rank {rank}: {each.why}" for rank, each in found)
            log.info(f"step {step}: the ranks end together ({reasons:.500})")
        self.ends_together = end is not None
        return end

    def on_rollback(self) -> None:
        """Forgets the marks of undone steps; the next steps are marked for pending proposals."""
        self._due_at, self._voted_at = None, 0
