"""What a page says of one run, or of one replay of one: curves, incidents, counts and facts."""

from __future__ import annotations

from typing import NamedTuple

from healcore.history import Counts, Curves, Incident, Mode
from healcore.history.process import RunState
from healcore.history.run import Mark, RunAttempt


class RunReport(NamedTuple):
    """Everything that a page needs to know of one run."""

    title: str
    mode: Mode
    policy_name: str
    policy_toml: str
    """Empty: not known."""
    fingerprint: str
    curves: Curves
    incidents: tuple[Incident, ...]
    counts: Counts
    facts: dict[str, str]
    """Label -> words."""
    state: RunState | None = None
    """How the run has ended; None: of a replay."""
    notes: tuple[str, ...] = ()
    """What a reader should know of how this came about: damaged lines, what is missing."""
    attempts: tuple[RunAttempt, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """Of the postmortem; may have several lines."""

    @property
    def would(self) -> bool:
        """Whether nothing was done: it lists what a policy would have done."""
        return self.mode is not Mode.HEAL
