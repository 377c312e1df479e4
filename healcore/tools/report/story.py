"""What a report tells of one run, or of one replay: its curves, its incidents, and the facts."""

from __future__ import annotations

from typing import Literal, NamedTuple

import numpy as np


class Incident(NamedTuple):
    """One incident: a run of alarms with one onset."""

    number: int
    """From 1, over the whole story."""
    attempt: int
    onset: int
    """Index of the row of its first alarm; -1: not known."""
    index: int
    """Index of the row of the order, or of its last alarm; -1: not known."""
    onset_step: float
    step: float
    cause: tuple[str, ...]
    action: tuple[str, ...]
    """What was ordered of the host; of a replay, what would have been."""
    skipped: int
    """Steps of it that were skipped."""
    outcome: str
    """In words."""
    lr_before: float | None = None
    """Multipliers of the learning rate."""
    lr_after: float | None = None
    checkpoint: int | None = None
    """Step of the checkpoint that was gone back to."""
    batches: tuple[tuple[int, int], ...] = ()
    """(epoch, index) of the batches that were left out, or else of those in which it began."""
    left_out: bool = False
    """Whether `batches` were left out."""
    evidence: tuple[str, ...] = ()
    """What stood out, the worst first, in words."""
    lr_path: tuple[float, ...] = ()
    """Every multiplier from `lr_before` to `lr_after`; empty: there is none between them."""
    stop: int = -1
    """Index of the row at which the stop was ordered; -1: not known."""
    stop_step: float | None = None
    """Step at which the stop was ordered; None: none was, or it is not known where."""
    last: int = -1
    """Index of the row of its last alarm; -1: it is `index`."""
    last_step: float | None = None
    """Step of its last alarm; None: it is `step`."""

    @property
    def end(self) -> tuple[float, int]:
        """Step and index of the last that is known of it."""
        if self.last_step is None:
            return self.step, self.index
        return self.last_step, self.last


class Part(NamedTuple):
    """One attempt: what follows on a start, a resume or a rollback."""

    number: int
    first_step: float
    name: str = ""
    """Where it is from: a file, a process, "after the rollback to step 40"."""


class Mark(NamedTuple):
    """Something on the axis that is no incident: a resume, a stop, the end."""

    step: float
    kind: str
    text: str


class Series(NamedTuple):
    """Curves, thinned, row by row in the order in which they were recorded.

    Every array is (n,). A value is NaN where it was not logged or is NaN, and infinite where it
    was recorded so; `nonfinite` tells what was logged and is not finite.
    """

    step: np.ndarray
    loss: np.ndarray
    grad_norm: np.ndarray | None = None
    threshold: np.ndarray | None = None
    """Above it a gradient norm is clipped, or is a spike."""
    lr_scale: np.ndarray | None = None
    """Multiplier of the learning rate."""
    index: np.ndarray | None = None
    """int64, of the rows in the trace; None: 0, 1, 2, ..."""
    attempt: np.ndarray | None = None
    """int64; None: all of them attempt 0."""
    nonfinite: np.ndarray | None = None
    """bool: a loss or norm was logged in this row and is not finite; None: not told apart."""
    rows: int | None = None
    """How many rows there were before they were thinned; None: all are here."""

    lonely: bool = False
    """Only single steps are known: points, and no line between them."""

    def undone(self) -> np.ndarray:
        """Bool (n,): rows that a later attempt replaced: it began at or before their step."""
        if self.attempt is None or not len(self.step):
            return np.zeros(len(self.step), bool)
        undone = np.zeros(len(self.step), bool)
        # Recorded order: everything after an attempt's first row is of it or of a later one.
        begins = np.flatnonzero(np.diff(self.attempt)) + 1
        for begin in begins:
            undone[:begin] |= self.step[:begin] >= self.step[begin]
        return undone


class Story(NamedTuple):
    """Everything that a report needs to know."""

    title: str
    kind: Literal["replay", "run"]
    policy_name: str
    policy_toml: str
    """Empty: not known."""
    fingerprint: str
    series: Series
    incidents: tuple[Incident, ...]
    facts: dict[str, str]
    notes: tuple[str, ...] = ()
    """What a reader should know of how this came about: damaged lines, what is missing."""
    parts: tuple[Part, ...] = ()
    marks: tuple[Mark, ...] = ()
    diagnosis: str = ""
    """Of the postmortem; may have several lines."""
    alarms: int | None = None
    """How many steps had a cause, where that is not told by the incidents."""
    skips: int | None = None
    """How many steps were skipped, where that is not told by the incidents or the facts."""
    clips: int | None = None
    """How many steps had their gradients clipped; None: not known, or told by the facts."""
    repeats: int = 0
    """Rollbacks after the first one of their incident."""

    @property
    def would(self) -> bool:
        """Whether nothing was done: it tells what a policy would have done."""
        return self.kind == "replay" or self.facts.get("Mode") == "observe"
