"""`Trace`: the rows of a run, joined from its files.

Joining merges records of one step, and numbers the attempts. Steps increase within an attempt. A
new attempt begins where a file begins at or before the last step, or where the step decreases
within a file: the run was resumed, and the earlier rows from that step on are stale. Only the steps
of the loss and of the gradient norm count, separately, because an evaluation that is written late
is no resume.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from healcore.console import counted
from healcore.tools.traces.formats import RowProblem
from healcore.tools.traces.names import (
    EPOCH,
    EPOCH_LENGTH,
    JUDGED_SIGNALS,
    KNOWN_COLUMNS,
    SIGNALS,
    STEP,
    TraceError,
)

_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""


class RawLog(NamedTuple):
    """The rows of one file, or of one run in a file, as written.

    `join_logs` makes the trace of a run from the raw logs of all its files. All arrays have one
    value for each row.
    """

    path: str
    """Path of the file."""
    run: str | None
    """Name of the run in a file with several runs, or None."""
    lines: np.ndarray
    """int (n,): the line of each row."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal, "epoch", "epoch_length" and "step"; NaN for no number. Steps are
    finite, or the log has none."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[RowProblem]
    """Lines and cells that could not be used."""
    notes: list[str]
    """Remarks about usable content, each with the path."""


class Rows(NamedTuple):
    """Rows of a trace as columns. Every array is (n,).

    Columns take a tenth of the memory of one object for each row, and a trace may have millions.
    """

    step: np.ndarray
    """float64: the recorded step, or the number of the row in a file without steps. Increases
    within an attempt, except for repeated rows and rows that are written late (evaluations)."""
    attempt: np.ndarray
    """int64, from 0. Increases where the recorded run was resumed from an earlier step."""
    values: Mapping[str, np.ndarray]
    """float32 for each signal of the trace: NaN and Inf as recorded, NaN if not logged."""
    logged: Mapping[str, np.ndarray]
    """bool, same keys: whether the row logs the signal. The texts nan and inf are values, an
    empty cell is not."""

    def select(self, where: slice | np.ndarray) -> Rows:
        """Selects some rows in all columns.

        Args:
            where: a slice, or a mask, bool (n,).

        Returns:
            The selected rows in their order.
        """
        values = {name: column[where] for name, column in self.values.items()}
        logged = {name: column[where] for name, column in self.logged.items()}
        return Rows(self.step[where], self.attempt[where], values, logged)


class TraceAttempt(NamedTuple):
    """The part of a run from one start or resume to the next.

    A replay restores the engine's state at each attempt, as the recorded run restored its own.
    """

    source: str
    """Path of the file in which the attempt begins."""
    first_step: float
    """Step of its first row."""
    resumes_after: int | None
    """The last row before the attempt that is still part of the run: the row's step is below
    `first_step`, and no later attempt replaced the row. None for an attempt from scratch."""


class Unreadable(NamedTuple):
    """A path without a usable trace, and the reason.

    A command over many paths reads the other paths, and lists these at its end.
    """

    path: str
    """The path as it was given."""
    problem: str
    """The reason, as a clause."""
    not_judged: bool = False
    """Whether the path has a log, but too little of the log can be used to judge the run."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The log of one run, in memory.

    A run that was resumed or rolled back has logged some steps twice. `rows` has both records, so
    that a replay sees what the detectors of the run would have seen. The function `lineage` selects
    the rows that the final weights come from.

        steps      1 2 3 4 5 6        attempt 0
        steps            4 5 6 7 8    attempt 1, resumed after step 3
        replaced         x x x        the steps 4 to 6 of attempt 0
    """

    name: str
    """The path as the user gave it, with `#run` for one run of an export of several runs."""
    rows: Rows
    """All rows in the order of the files, including stale tails; at least one. Records of one
    step that log different signals are one row."""
    attempts: tuple[TraceAttempt, ...]
    """The attempts, in the order of writing."""
    replaced: np.ndarray
    """bool (n,): rows that a later attempt replaced, because it began at their step or earlier."""
    problems: tuple[str, ...]
    """The lines, cells and records that could not be used, each with file and line."""
    notes: tuple[str, ...]
    """Remarks about usable content: a resume, a column that was not used."""
    files: int = 1
    """Number of files of the run."""
    unit: str = STEP
    """What `Rows.step` counts: "step", or "epoch" or "row" if the log names no step."""

    @property
    def signals(self) -> frozenset[str]:
        """Signals that some row logs, such as "loss" and "grad_norm"."""
        logged = self.rows.logged
        return frozenset(name for name in logged if logged[name].any())


def lineage(trace: Trace) -> Rows:
    """Selects the rows of the final run: without stale tails and repeated steps.

    A probe judges these rows, because the final weights come from no other rows.

    Args:
        trace: the trace, with the rows of all attempts.

    Returns:
        The rows in order. If rows have the same step and signals, the last row remains.
    """
    rows = trace.rows.select(~trace.replaced)
    repeated = np.zeros(len(rows.step), bool)
    for logged in rows.logged.values():
        repeated[:-1] |= logged[1:] & logged[:-1]
    repeated[:-1] &= rows.step[1:] == rows.step[:-1]
    return rows.select(~repeated)


_MAX_LAST = 2
"""Number of rows without a signal with which a run may end, such as a summary."""


def missing_signals(trace: Trace) -> dict[str, str]:
    """Finds the signals of a step that the end of the final run lacks.

    Some programs write NaN as an empty cell or null, or do not write it. So a run that diverged may
    look like a run that stopped to log its loss. A signal that only every n-th row logs is missing
    between these rows too.

    Args:
        trace: the trace, with the rows of all attempts.

    Returns:
        Signal -> a clause such as "the loss is missing from row 85 on (step 3385)".
    """
    rows = lineage(trace)
    found: dict[str, str] = {}
    for signal in JUDGED_SIGNALS:
        logged = np.flatnonzero(rows.logged.get(signal, ()))
        # A summary at the end may have the signal once more.
        logged = logged[logged < len(rows.step) - _MAX_LAST]
        if not len(logged):
            continue
        first = int(logged[-1]) + 1
        later = np.unique(rows.step[first:])  # a step may have several rows of evaluations
        later = later[later > rows.step[first - 1]]
        longest_gap = np.diff(logged, prepend=-1).max() - 1
        if len(later) > max(_MAX_LAST, 2 * longest_gap):
            found[signal] = f"the {signal} is missing from row {first} on"
            if trace.unit != "row":
                found[signal] += f" ({trace.unit} {later[0]:.15g})"
    return found


def join_logs(name: str, logs: Sequence[RawLog]) -> Trace:
    """Joins the files of a run in the order of writing.

    Args:
        name: name of the trace.
        logs: at least one log with at least one row in all.

    Returns:
        The trace: records of one step are one row, and the attempts are numbered.

    Raises:
        TraceError: the steps decrease more than `_MAX_ATTEMPTS` times.
    """
    begins = np.cumsum([0, *(len(log.lines) for log in logs)])
    numbers: dict[str, np.ndarray] = {}
    masks: dict[str, np.ndarray] = {}
    for column in (*KNOWN_COLUMNS, EPOCH_LENGTH):
        numbers[column] = np.concatenate([log.numbers[column] for log in logs])
    for signal in SIGNALS:
        mask = np.concatenate([log.logged[signal] for log in logs])
        if mask.any():
            masks[signal] = mask
    notes = [note for log in logs for note in log.notes]
    problems = [problem.describe(log.path) for log in logs for problem in log.problems]

    step, epoch = numbers[STEP], numbers[EPOCH]
    unit = STEP
    without_steps = [log.path for log in logs if np.isnan(log.numbers[STEP]).all()]
    one_row_each = (epoch % 1 == 0).all() and (np.diff(epoch) > 0).all()
    if without_steps and one_row_each and len(epoch) > 1:
        unit, step = EPOCH, epoch
    elif without_steps:
        unit, step = "row", np.where(np.isnan(step), np.arange(len(step)), step)
    elif length := _count_over_epochs(step, epoch, numbers[EPOCH_LENGTH]):
        notes.append(
            f"{name}: the steps begin again in each epoch, and are counted over all epochs, "
            f"{length:,.15g} in each"
        )
    for path in without_steps:
        notes.append(f"{path}: it names no step (--column step=NAME): its {unit}s are counted")

    attempt = _number_attempts(step, masks, begins)
    row = _number_rows(step, attempt, masks)
    first = np.unique(row, return_index=True)[1]
    step, attempt = step[first], attempt[first]
    values: dict[str, np.ndarray] = {}
    logged: dict[str, np.ndarray] = {}
    for signal, mask in masks.items():
        values[signal] = np.full(len(first), np.nan, np.float32)
        logged[signal] = np.zeros(len(first), bool)
        with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
            values[signal][row[mask]] = numbers[signal][mask]
        logged[signal][row[mask]] = True
    starts = np.unique(attempt, return_index=True)[1].tolist()
    resumed, replaced = _find_resumed_rows(step, starts)
    attempts: list[TraceAttempt] = []
    for start, resumes_after in zip(starts, resumed, strict=True):
        source = logs[int(np.searchsorted(begins, first[start], side="right")) - 1].path
        attempts.append(TraceAttempt(source, float(step[start]), resumes_after))
    for number, each in enumerate(attempts[1:], 1):
        notes.append(
            f"{each.source}: the run went back (a resume or a rollback): attempt {number} "
            f"begins at {unit} {each.first_step:.15g}"
        )
    repeats = int(((np.diff(step) == 0) & (np.diff(attempt) == 0)).sum())
    if repeats:
        text = f"{counted(repeats, 'row')} with the {unit} of the row before"
        problems.append(f"{name}: {text}: several runs, ranks or evaluations are judged as one run")
    return Trace(
        name=name,
        rows=Rows(step, attempt, values, logged),
        attempts=tuple(attempts),
        replaced=replaced,
        problems=tuple(problems),
        notes=tuple(notes),
        files=len({log.path for log in logs}),
        unit=unit,
    )


def _count_over_epochs(step: np.ndarray, epoch: np.ndarray, length: np.ndarray) -> float:
    """Counts steps that begin again in each epoch over all epochs, in place.

    `length` has the number of batches in an epoch where the log says it, as in "[40/47]", and NaN
    otherwise. Returns the length of an epoch, or 0 if the steps do not begin again.
    """
    rise = np.diff(step)
    usual = 0.0
    if (rise > 0).any():
        usual = float(np.median(rise[rise > 0]))
    if np.isfinite(length).all():
        longest = float(length.max())
        if np.isnan(epoch).any():
            # Without an epoch, a count that falls after it has reached the end begins an epoch.
            ends = (rise <= 0) & (step[:-1] + (usual or longest) > length[:-1])
            epoch = np.cumsum([1, *ends], dtype=float)
        if (epoch % 1).any() or ((np.diff(epoch) > 0) & (rise > 0)).any():
            return 0.0  # the steps are counted over all epochs already
        first = float(epoch.min())
        if first > 1:
            # A resumed run may not log the first epoch. Programs that count their batches from 0
            # count their epochs from 0 too.
            first = float(step.min() > 0)
    else:
        restarts = (rise < 0) & (np.diff(epoch) > 0)
        if not (restarts.any() and usual and (epoch % 1 == 0).all()):
            return 0.0
        longest = float(np.ptp(step)) + usual
        first = float(epoch.min())
    if epoch.max() <= first:
        return 0.0
    step += (epoch - first) * longest
    return longest


def _number_attempts(
    step: np.ndarray, logged: Mapping[str, np.ndarray], begins: np.ndarray
) -> np.ndarray:
    """Numbers the attempt of each record, int (n,); `begins` has the first record of each file.

    Raises TraceError for more than `_MAX_ATTEMPTS` attempts.
    """
    backs: list[tuple[int, int]] = []  # a record that goes back, and the one before of its signal
    for signal in JUDGED_SIGNALS:
        records = np.flatnonzero(logged.get(signal, ()))
        files = np.searchsorted(begins, records, side="right")
        rise = np.diff(step[records])
        is_back = (rise < 0) | ((rise == 0) & (np.diff(files) > 0))
        backs += zip(records[1:][is_back].tolist(), records[:-1][is_back].tolist(), strict=True)
    starts = [0]
    for record, before in sorted(backs):
        if before >= starts[-1]:
            starts.append(record)
    if len(starts) > _MAX_ATTEMPTS:
        raise TraceError(
            f"the steps decrease {len(starts) - 1:,} times. This looks like several runs or ranks "
            "in one file, or a file in reverse order. Write one file per run, with increasing steps"
        )
    return np.searchsorted(starts, np.arange(len(step)), side="right") - 1


def _number_rows(
    step: np.ndarray, attempt: np.ndarray, logged: Mapping[str, np.ndarray]
) -> np.ndarray:
    """Numbers the row of each record, int (n,): different signals of a step share a row."""
    if (np.diff(step) > 0).all():
        return np.arange(len(step))
    bits = np.zeros(len(step), np.int64)
    for at, mask in enumerate(logged.values()):
        bits |= mask.astype(np.int64) << at
    rows: list[int] = []
    taken: list[int] = []  # bits of each row
    row_at: dict[tuple[int, float], int] = {}  # attempt and step -> the last row
    places = zip(attempt.tolist(), step.tolist(), strict=True)
    for place, own in zip(places, bits.tolist(), strict=True):
        row = row_at.get(place)
        if row is None or own & taken[row]:
            row = row_at[place] = len(taken)
            taken.append(0)
        taken[row] |= own
        rows.append(row)
    return np.array(rows)


def _find_resumed_rows(step: np.ndarray, starts: list[int]) -> tuple[list[int | None], np.ndarray]:
    """Finds the row that each attempt resumes after, or None for an attempt from scratch.

    Returns the rows, and bool (n,): rows that a later attempt replaced.
    """
    # A row that is written late counts at the step that the run had reached.
    reached = np.concatenate(list(map(np.maximum.accumulate, np.split(step, starts[1:]))))
    replaced = np.zeros(len(step), bool)
    resumed: list[int | None] = [None]
    for start in starts[1:]:
        replaced[:start] |= reached[:start] >= step[start]
        remaining = np.flatnonzero(~replaced[:start]).tolist()
        resumed.append(max(remaining, default=None))
    return resumed, replaced
