"""`RankGroup`: all ranks end at the same step if one rank is asked to end.

A signal or a stop file may reach one rank only. This rank must not end alone: the others would wait
for it in their next collective. Instead it makes a proposal:

    self.propose(Proposal("signal 15", signal=15))

The driver marks the steps from then on (`Driver.request_vote`; in torch a bit of the step's own
all_reduce), and every rank reads the mark with the step's record, `LAG` steps later. Then the ranks
exchange their proposals once, and all of them end.
"""

from __future__ import annotations

import os
from typing import NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.run.steps import LAG, StepResult
from healcore.runtime.run.termination import EndRequested, StopFile, TerminationWatch, exit_for
from healcore.runtime.store.ranks import Ranks
from healcore.runtime.story.run_log import RunLog


class Proposal(NamedTuple):
    """Proposal of one rank that all ranks save their last state and end."""

    why: str
    signal: int | None = None  # the signal that asks the run to end, or None for another reason


class RankGroup:
    """The ranks of one run, and the requests to end it: signals and the stop file.

    Attributes:
        ranks: The framework's ranks.
        ends_together: Whether the ranks have agreed to end after this step.
        termination: The received signals.
    """

    def __init__(
        self, ranks: Ranks, driver: Driver, stop_file: str | os.PathLike[str] | None = None
    ) -> None:
        self.ranks = ranks
        self.rank, self.world, self.gather = ranks.rank, ranks.world, ranks.gather
        self.ends_together = False
        self.stop_file = StopFile(stop_file)
        self.termination = TerminationWatch(self._propose_end if self.world > 1 else None)
        self._driver = driver
        self._pending: list[Proposal] = []
        self._due_at: int | None = None
        self._proposed_end = False
        """Whether this rank has proposed to end because of the stop file."""

    def raise_if_asked(self, *, may_end: bool) -> None:
        """Raises the exception that ends the run if it was requested; with votes proposes the end.

        Args:
            may_end: whether the state can be saved now, so that a rank may end alone.
        """
        if self.world > 1:  # the next step brings the vote
            if self.stop_file.found and not self._proposed_end:
                self._proposed_end = True
                self.propose(Proposal(self.stop_file.why))
        elif may_end:
            self.termination.raise_if_alone()
            if self.stop_file.found:
                raise EndRequested(self.stop_file.why)

    def propose(self, proposal: Proposal) -> None:
        """Makes a proposal to all ranks, from the training thread or its signal handler."""
        self._pending.append(proposal)
        self._driver.request_vote()

    def _propose_end(self, number: int) -> None:
        self.propose(Proposal(f"signal {number}", signal=number))

    def note_mark(self, step: StepResult) -> None:
        """Schedules a vote if a step is marked.

        The vote is due at a fixed step, because a rank that evaluates alone reads the mark earlier.
        """
        if step.vote_requested and self._due_at is None:
            self._due_at = step.index + 1 + LAG

    def vote_when_due(self, step: int, log: RunLog) -> None:
        """Votes if a vote is due after `step` steps (collective): raises what ends the run."""
        if self._due_at is None or step < self._due_at:
            return
        of_ranks: list[list[Proposal]] = self.gather(self._pending)
        found = [(rank, each) for rank, some in enumerate(of_ranks) for each in some]
        first = found[0][1]
        listed = [{"rank": rank, "outcome": "end", "why": each.why} for rank, each in found]
        log.event("vote", step=step, outcome="end", why=first.why, of_ranks=listed)
        reasons = ", ".join(f"rank {rank}: {each.why}" for rank, each in found)
        log.info(f"step {step}: the ranks end together ({reasons:.500})")
        self.ends_together = True
        raise EndRequested(first.why) if first.signal is None else exit_for(first.signal)

    def on_rollback(self) -> None:
        """Forgets the mark of an undone step. The next steps are marked until the vote."""
        self._due_at = None
