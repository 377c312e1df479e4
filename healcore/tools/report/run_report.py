"""The data of a report: one run, or one replay of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from healcore.console import counted
from healcore.history import Counts, Curves, Incident, IncidentOutcome, Mode
from healcore.history.process import RunState
from healcore.history.run import AttemptOrigin, Mark, RunAttempt
from healcore.runtime.sentences import STATES, repeats
from healcore.tools.report.markers import MARKERS

_ORIGINS = {
    AttemptOrigin.START: "the start",
    AttemptOrigin.PROCESS: "another process",
    AttemptOrigin.RESUME: "resumed",
    AttemptOrigin.ROLLBACK: "rollback",
    AttemptOrigin.TRIAL: "trial",
    AttemptOrigin.METRICS: "in no event",
}
_GAPS = 5


class RunReport(NamedTuple):
    """One run: curves, incidents, counts and facts."""

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
    state: RunState | None = None
    """How the run has ended; None for a replay."""
    notes: tuple[str, ...] = ()
    """Damaged lines and missing parts of the sources."""
    attempts: tuple[RunAttempt, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """The text of the postmortem; may have several lines."""
    unreadable: str = ""
    """Why the metrics could not be read at all, or an empty string."""

    @property
    def would(self) -> bool:
        """Whether nothing was done (observed, replayed): the report has what would have been."""
        return self.mode is not Mode.HEAL

    @property
    def row_count(self) -> str:
        """How many rows the run has."""
        rows = self.curves.rows
        return f"{len(self.curves.step) if rows is None else rows:,}"

    def attempt_text(self, attempt: RunAttempt) -> str:
        """Where an attempt begins, and how many incidents it has."""
        number = sum(incident.attempt == attempt.number for incident in self.incidents)
        incidents = counted(number, "incident") if number else "no incident"
        origin = _ORIGINS.get(attempt.origin) or attempt.source or attempt.number
        return f"from step {attempt.first_step:.0f} ({origin}): {incidents}"

    def ending(self) -> str:
        """How a run ended, or at which step a replayed one would have; empty: it would not."""
        if self.state is not None:
            return STATES[self.state]
        stops = [mark.step for mark in self.marks if mark.kind == "stop"]
        return f"step {stops[0]:.0f}" if stops else ""

    def gaps(self) -> list[str]:
        """Where steps are missing in the curves."""
        what = "no row" if self.mode is Mode.REPLAY else "no metrics"
        lines = []
        for gap in self.curves.gaps():
            low, high = gap.low + gap.stride, gap.high - gap.stride
            lines.append(
                f"{what} for steps {low:.0f}–{high:.0f}: the curves are broken there"
                if gap.exact
                else f"{what} for some {gap.missing:.0f} steps between {gap.low:.0f} and "
                f"{gap.high:.0f}"
            )
        lines = list(dict.fromkeys(lines))  # repeated steps may be missing twice
        more = len(lines) - _GAPS
        return lines[:_GAPS] + ([f"{what} at {more} more places"] if more > 0 else [])

    def outcomes(self) -> list[str]:
        """How many incidents had which outcome; one with a rollback and a stop counts in both."""
        counts = self.counts
        found = {
            one: sum(incident.outcome is one for incident in self.incidents) for one in MARKERS
        }
        found |= {IncidentOutcome.STOP: counts.stops, IncidentOutcome.ROLLBACK: counts.rollbacks}
        again = repeats(counts, would=self.would)
        return [
            f"{found[one]} × {marker.label(self.would)}"
            + (f" ({again})" if one is IncidentOutcome.ROLLBACK and again else "")
            for one, marker in MARKERS.items()
            if found[one]
        ]

    def stop_after_rollback(self, place: int) -> tuple[float, int] | None:
        """Step and index (-1: not known) of the stop after the rollback in incident `place`."""
        incident = self.incidents[place]
        if incident.outcome is not IncidentOutcome.ROLLBACK or "STOP" not in incident.action:
            return None
        if incident.stop_step is not None:
            return incident.stop_step, incident.stop
        after = self.incidents[place + 1 : place + 2]
        end = after[0].onset_step if after and after[0].attempt == incident.attempt else np.inf
        stops = (mark.step for mark in self.marks if mark.kind == "stop")
        at = next((step for step in stops if incident.onset_step <= step < end), None)
        return None if at is None else (at, -1)


def by_severity(reports: Sequence[RunReport]) -> list[RunReport]:
    """The run with the most rollbacks, incidents and skipped steps first."""
    return sorted(
        reports,
        key=lambda each: (-each.counts.rollbacks, -each.counts.incidents, -each.counts.skips),
    )


def short_names(reports: Sequence[RunReport]) -> list[str]:
    """The end of each title's path, or all of it if two would be equal."""
    ends = ["/".join(each.title.split("/")[-2:]) for each in reports]
    whole = {end: {r.title for r, e in zip(reports, ends, strict=True) if e == end} for end in ends}
    return [
        end if len(whole[end]) == 1 else each.title for each, end in zip(reports, ends, strict=True)
    ]
