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
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.incidents.steps import LAG, StepResult
from healcore.runtime.loop.termination import EndRequested, StopFile, TerminationWatch, exit_for
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks

_MAX_REPORTS = 200
"""Max distinct lines that a rank reports: a failed disk may fail at every step."""


class Proposal(NamedTuple):
    """Proposal of one rank to all ranks."""

    why: str
    ends: bool = False
    """Whether the run ends and saves its last state. Otherwise rank 0 only reports `why`."""
    signal: int | None = None
    """The signal that asks the run to end, or None for another reason."""

    @property
    def outcome(self) -> str:
        """`end` or `report`, for the event."""
        return "end" if self.ends else "report"

    def end(self) -> BaseException:
        """The exception that ends the loop."""
        return EndRequested(self.why) if self.signal is None else exit_for(self.signal)


class RankGroup:
    """The ranks of one run, and the requests to end it: signals and the stop file.

    The driver marks steps, and `LAG` steps later the marks are read.

    Attributes:
        processes: The framework's ranks.
        votes: Whether the ranks vote. This requires several ranks and a driver that marks steps.
        ends_together: Whether the ranks have agreed to end after this step.
        termination: The received signals.
    """

    def __init__(
        self,
        ranks: Ranks,
        driver: Driver,
        stop_file: str | os.PathLike[str] | None = None,
    ) -> None:
        self.processes = ranks
        self.rank, self.world, self.gather = ranks.rank, ranks.world, ranks.gather
        self.votes = ranks.world > 1 and driver.request_vote(False)
        self.ends_together = False
        self.stop_file = StopFile(stop_file)
        self.termination = TerminationWatch(self._propose_end if self.votes else None)
        self._driver = driver
        self._pending_proposals: list[Proposal] = []
        self._reported: set[str] = set()
        """Lines that this rank has written or reported."""
        self._due_at: int | None = None
        self._voted_at = 0
        self._proposed_end = False
        """Whether this rank has proposed to end because of the stop file."""

    def close(self) -> None:
        """Stops watching for signals."""
        self.termination.stop()

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

    # -- votes ----------------------------------------------------------------------------------

    def propose(self, proposal: Proposal) -> None:
        """Makes a proposal to all ranks, from the training thread or its signal handler."""
        self._pending_proposals.append(proposal)
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
        """Schedules a vote if a step is marked. Marks from before the last vote are outdated."""
        if step.vote_requested and self._due_at is None and step.index >= self._voted_at:
            self._due_at = step.index + 1 + LAG

    def due(self, step: int) -> bool:
        """Whether all ranks vote now, after `step` steps.

        The time of reading the mark does not matter: a rank that evaluates alone reads earlier.
        """
        return self._due_at is not None and step >= self._due_at

    def vote(self, step: int, log: RunLog) -> Proposal | None:
        """Exchanges proposals. Returns the lowest rank's proposal to end, or None. Collective."""
        self._due_at, self._voted_at = None, step
        mine, self._pending_proposals = self._pending_proposals, []
        of_ranks: Sequence[Sequence[Proposal]] = self.gather(mine)
        self._driver.request_vote(bool(self._pending_proposals))  # a signal may have come meanwhile
        known = self._reported if self.rank == 0 else ()  # all ranks may have seen the same
        proposals = [
            (rank, each)
            for rank, some in enumerate(of_ranks)
            for each in some
            if each.ends or each.why not in known
        ]
        if not proposals:
            return None
        end_proposal = next((each for _, each in proposals if each.ends), None)
        outcome = end_proposal or proposals[0][1]
        log.event(
            "vote",
            step=step,
            outcome=outcome.outcome,
            why=outcome.why,
            of_ranks=[
                {"rank": rank, "outcome": each.outcome, "why": each.why} for rank, each in proposals
            ],
        )
        for rank, each in proposals:
            if not each.ends:
                log.warning(f"step {step}: rank {rank}: {each.why:.600}")
        if end_proposal is not None:
            reasons = ", ".join(f"rank {rank}: {each.why}" for rank, each in proposals)
            log.info(f"step {step}: the ranks end together ({reasons:.500})")
        self.ends_together = end_proposal is not None
        return end_proposal

    def on_rollback(self) -> None:
        """Forgets the marks of undone steps; the next steps are marked for pending proposals."""
        self._due_at, self._voted_at = None, 0


# -- before the run -------------------------------------------------------------------------------


def check_same(mine: Mapping[str, Any], ranks: Ranks) -> None:
    """Raises ValueError on all ranks if their options differ: they would wait for each other."""
    for rank, theirs in enumerate(ranks.gather(dict(mine))):
        differ = [name for name, value in mine.items() if theirs[name] != value]
        if differ:
            raise ValueError(
                f"rank {rank} has another {', '.join(differ)} than rank {ranks.rank}: pass the "
                "same arguments to Healer(...) on every rank"
            )
