"""`Votes`: what one rank knows alone, and all have to act upon at the same step.

A signal, a stop file or an unreadable batch reaches one rank only. It must not act alone: the
others would wait for it in their next collective. So it makes a proposal:

    loop.votes.propose(Proposal(Severity.END, "signal 15", signal=15))

The driver marks the steps from then on (`Driver.request_vote`; in torch a bit of the step's own
all_reduce), and every rank reads the mark with the step's record, `lag` steps later. Only then they
exchange what they propose, once. The most severe proposal is carried out, by all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

from healcore.runtime.driver import Driver
from healcore.runtime.incidents.delayed_reader import StepResult
from healcore.runtime.run_log import RunLog
from healcore.runtime.store.ranks import Ranks


class Severity(enum.IntEnum):
    """What is proposed, the least severe first."""

    REPORT = 1
    """The events file says it; nothing else."""
    SAVE = 2
    """A checkpoint is saved."""
    END = 3
    """The run ends, and saves its last state."""
    STOP = 4
    """The run ends with a diagnosis, as if the policy had stopped it; its state is not saved."""


class Proposal(NamedTuple):
    """What one rank proposes."""

    severity: Severity
    why: str
    signal: int | None = None
    """The signal that asks the run to end, if there was one."""


class Votes:
    """The votes of one run.

    Args:
        driver: of the run, which marks steps.
        ranks: of the run.
        lag: steps after which a step's mark is read.
        log: for the event, with every rank's proposals.
    """

    def __init__(self, driver: Driver, ranks: Ranks, lag: int, log: RunLog) -> None:
        self._driver = driver
        self._ranks = ranks
        self._lag = lag
        self._log = log
        self._mine: list[Proposal] = []
        self._reported: set[str] = set()
        """What this rank has written or reported, of which no other report is needed."""
        self._due_at: int | None = None
        self._voted_at = 0
        self.possible = ranks.world > 1 and driver.request_vote(False)
        """False: one process, or a driver that cannot mark steps. Each rank acts for itself."""
        if self.possible:
            log.on_local = self._report

    def propose(self, proposal: Proposal) -> None:
        """Proposes something to all ranks. Of this thread, or of a handler of signals in it."""
        self._mine.append(proposal)
        self._driver.request_vote(True)

    def propose_end(self, number: int) -> None:
        """Proposes to end because of a signal; called by its handler."""
        self.propose(Proposal(Severity.END, f"signal {number}", number))

    def _report(self, text: str) -> None:
        """Reports to rank 0, which alone writes events, what another rank has seen, once."""
        known = text in self._reported
        if len(self._reported) < _MOST_REPORTS:
            self._reported.add(text)
            if self._ranks.rank and not known:
                self.propose(Proposal(Severity.REPORT, text))

    def read(self, step: StepResult) -> None:
        """Takes every step that is read. Marks from before the last vote have been answered."""
        if step.vote_requested and self._due_at is None and step.index >= self._voted_at:
            self._due_at = step.index + 1 + self._lag

    def due(self, step: int) -> bool:
        """Whether all ranks vote now, after `step` steps.

        Not as soon as this rank has read the mark: one that evaluates alone reads earlier.
        """
        return self._due_at is not None and step >= self._due_at

    def hold(self, step: int) -> Proposal | None:
        """The most severe proposal of all ranks; None: there is none. Collective.

        Of equal ones the lowest rank's.
        """
        self._due_at, self._voted_at = None, step
        mine, self._mine = self._mine, []
        of_ranks: Sequence[Sequence[Proposal]] = self._ranks.gather(mine)
        self._driver.request_vote(bool(self._mine))  # a signal may have come meanwhile
        known = self._reported if self._ranks.rank == 0 else ()  # all ranks may have seen it
        every = [
            (rank, each)
            for rank, some in enumerate(of_ranks)
            for each in some
            if each.severity is not Severity.REPORT or each.why not in known
        ]
        if not every:
            return None
        _, severest = max(every, key=lambda pair: (pair[1].severity, -pair[0]))
        self._log.event(
            "vote",
            step=step,
            outcome=severest.severity.name.lower(),
            why=severest.why,
            of_ranks=[_evidence(rank, each) for rank, each in every],
        )
        for rank, each in every:
            if each.severity is Severity.REPORT:
                self._log.warning(f"step {step}: rank {rank}: {each.why:.600}")
        if severest.severity is not Severity.REPORT:
            of = ", ".join(f"rank {rank}: {each.why}" for rank, each in every)
            self._log.info(f"step {step}: the ranks {_DONE[severest.severity]} ({of:.500})")
        return severest

    def on_rollback(self) -> None:
        """Forgets marks of steps that were undone; what is proposed marks the next ones."""
        self._due_at, self._voted_at = None, 0


_MOST_REPORTS = 200
"""Different lines that a rank reports: a disk that fails may fail at every step."""
_DONE = {Severity.SAVE: "save", Severity.END: "end together", Severity.STOP: "stop"}


def _evidence(rank: int, proposal: Proposal) -> dict[str, Any]:
    return {"rank": rank, "outcome": proposal.severity.name.lower(), "why": proposal.why}
