"""Defines the data of a report on a run or a replay."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from healcore.console import counted
from healcore.history import Counts, Curves, Incident, IncidentOutcome, Mode
from healcore.history.incident import count_incidents
from healcore.history.process import RunState
from healcore.history.run import Mark, RunAttempt
from healcore.runtime.postmortem.sentences import STATES

MAX_LINES = 20
"""Limit of the lines of one kind that a report lists."""


class Marker(NamedTuple):
    """Text and look of an outcome."""

    done: str
    would: str
    """Text in an observed run or a replay."""
    shape: str
    """Marker of matplotlib."""
    colour: str
    """Safe for colour-blind readers."""


MARKERS = {
    IncidentOutcome.STOP: Marker("stopped the run", "would have stopped", "s", "#000000"),
    IncidentOutcome.ROLLBACK: Marker("rollback", "would have rolled back", "<", "#C04A00"),
    IncidentOutcome.SKIP: Marker("skipped", "would have skipped", "v", "#9A6700"),
    IncidentOutcome.ALERT: Marker("alert only", "alert only", "o", "#A8517F"),
}
"""Outcome -> marker, the most severe outcome first."""


class RunReport(NamedTuple):
    """The report on a run or a replay."""

    title: str
    mode: Mode
    policy_name: str
    policy_toml: str
    """The policy as TOML, or an empty string if unknown."""
    fingerprint: str
    curves: Curves
    incidents: tuple[Incident, ...]
    counts: Counts
    facts: dict[str, str]
    state: RunState | None = None
    """How the run ended, or None for a replay."""
    notes: tuple[str, ...] = ()
    """Sentences about damaged or missing data."""
    attempts: tuple[RunAttempt, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """The diagnosis of the postmortem, or an empty string."""

    @property
    def would(self) -> bool:
        """Whether the report shows what the policy would have done, in mode OBSERVE or REPLAY."""
        return self.mode is not Mode.HEAL

    @property
    def row_count(self) -> str:
        """Number of rows of the run, as text."""
        rows = self.curves.rows
        return f"{len(self.curves.step) if rows is None else rows:,}"

    def attempt_text(self, attempt: RunAttempt) -> str:
        """Describes the start of an attempt, and counts its incidents."""
        own = [each for each in self.incidents if each.attempt == attempt.number]
        incidents = counted(count_incidents(own).incidents, "incident")
        return (
            f"from step {attempt.first_step:.0f} ({attempt.source or attempt.origin}): {incidents}"
        )

    def ending(self) -> str:
        """Returns how the run ended, the step of a replay's stop, or an empty string."""
        if self.state is not None:
            return STATES[self.state]
        stops = [mark.step for mark in self.marks if mark.kind == "stop"]
        return f"would stop at step {stops[0]:.0f}" if stops else ""

    def outcome_text(self, outcome: IncidentOutcome) -> str:
        """The text of an outcome, for an observed run or a replay with "would have"."""
        return MARKERS[outcome].would if self.would else MARKERS[outcome].done


def by_severity(reports: Sequence[RunReport]) -> list[RunReport]:
    """Sorts by rollbacks, incidents and skipped steps, in decreasing order."""
    counts = operator.attrgetter("counts.rollbacks", "counts.incidents", "counts.skips")
    return sorted(reports, key=counts, reverse=True)


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """Returns the last two parts of each title's path, or the title if two titles share them."""
    titles = [report.title for report in reports]
    short = {title: "/".join(title.split("/")[-2:]) for title in titles}
    counts = Counter(short.values())
    return [short[title] if counts[short[title]] == 1 else title for title in titles]


def first_lines(prefix: str, lines: Sequence[str]) -> list[str]:
    """Returns the first few lines, each with the prefix, and a line with the number of others."""
    shown = [f"{prefix}: {line}" for line in lines[:MAX_LINES]]
    more = len(lines) - len(shown)
    return shown + ([f"{prefix}: {more} more"] if more > 0 else [])
