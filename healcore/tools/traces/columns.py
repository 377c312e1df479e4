"""Defines logs and traces: the rows of one file, and the rows of a run, as whole columns.

Joining merges records of one step, and numbers the attempts. Steps increase within an attempt. A
new attempt begins where a file begins at or before the last step, or where the step decreases
within a file: the run was resumed, and the earlier rows from that step on are stale. Only the steps
of the loss and of the gradient norm count, separately, because an evaluation that is written late
is no resume.
"""

from __future__ import annotations

import bisect
import itertools
import math
import operator
import re
from array import array
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

import numpy as np

from healcore import regular_file
from healcore.console import counted
from healcore.core.errors import HealcoreError

SIGNALS = ("loss", "grad_norm", "eval_loss")
"""Columns that are read from a log: signals of `healcore.core.signals`."""

STEP, EPOCH = "step", "epoch"

LENGTH = "epoch_length"
"""Number of batches in an epoch, where a log counts its steps within each epoch."""

JUDGED = ("loss", "grad_norm")
"""A row can be judged if it has one of these. Only these show where a run was resumed."""

KNOWN_FORMATS = (
    "a CSV file with a header, a W&B export (CSV), JSON Lines, trainer_state.json, console output "
    "that names the numbers, a TensorBoard event file, or healcore's own metrics"
)
_HEAD_BYTES = 1 << 20
_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""
_MAX_UNUSABLE = 0.1
"""Largest fraction of the lines of a column that may be unusable in a log that is judged."""
_ABBREVIATED = re.compile(r"\s*(\d+)(?:\.(\d+))?\s*([kKMBGT])\s*")
_UNITS = {"k": 1e3, "K": 1e3, "M": 1e6, "B": 1e9, "G": 1e9, "T": 1e12}
_BLOCK = 4096
"""Rows that are parsed as columns, if their cells are plain numbers."""
_MAX_ATTEMPTS = 1000
"""More restarts mean that a file has several writers."""
_JUDGED_BITS = ((), (1,), (2,), (1, 2))
"""Bits of the loss and of the gradient norm, by their sum."""


class TraceError(HealcoreError, ValueError):
    """A trace cannot be read. The message has the file, the rule and the remedy.

    For example, two columns may each be the loss, or no column has a known name. One unreadable
    file does not end a command: `open_traces` returns the reason beside the readable traces.
    """


class NotJudgedError(TraceError):
    """A log can be read, but a verdict on what is readable would be no verdict on the run.

    For example, a fifth of the cells of the loss are damaged. A run that diverged in these rows
    would look healthy in the other rows.
    """


class Problem(NamedTuple):
    """Content of a file that could not be used, with its place.

    Commands print problems with the path of the file, so that a user can look at the line.
    """

    line: int
    """Line from 1, or 0 in a format without lines."""
    text: str
    """Description."""
    unusable: bool = False
    """Whether the line may have had a loss or a norm, so that too many of them forbid a verdict."""


class RawLog(NamedTuple):
    """The rows of one file, or of one run in a file, as written.

    A reader of a format makes raw logs. `join_logs` makes the trace of a run from the raw logs of
    all its files. All arrays have one value for each row.
    """

    path: str
    run: str | None
    """Name of the run in a file with several runs, or None."""
    numbers: Mapping[str, np.ndarray]
    """float64 (n,) by signal, "epoch", "epoch_length" and "step", if the file has steps, which are
    finite."""
    logged: Mapping[str, np.ndarray]
    """bool (n,) by signal: whether the row logs the signal."""
    problems: list[Problem]
    notes: list[str]
    """Remarks about usable content, each with the path."""

    @property
    def rows(self) -> int:
        """Number of rows n, the length of each array."""
        return len(next(iter(self.logged.values())))


def read_head(path: str) -> bytes:
    """Reads the start of a file, from which the format of the file is recognized.

    Args:
        path: a regular file. Another kind of file, such as a pipe, could block the read forever.

    Returns:
        The first megabyte of the content.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    with open(path, "rb", opener=regular_file.opener) as file:
        return file.read(_HEAD_BYTES)


def open_text(path: str) -> TextIO:
    """Opens a log as text. One damaged byte does not make the other lines unreadable.

    Args:
        path: a regular file, with or without a byte order mark.

    Returns:
        The open file, decoded as UTF-8. Line ends are unchanged, because csv needs them, and
        invalid bytes become U+FFFD.

    Raises:
        OSError: the file cannot be opened, or is no regular file.
    """
    return open(
        path, encoding="utf-8-sig", errors="replace", newline="", opener=regular_file.opener
    )


def parse_number(value: Any) -> float | None:
    """Parses a cell of a table, or a value of a JSON record.

    Args:
        value: a text, a number or None. A text may be abbreviated, such as "12.5K".

    Returns:
        The number, which may be NaN or infinity, or None for a text such as "" or "N/A".

    Raises:
        ValueError: the value is not a number, for example a text with words, or a bool.
    """
    if value is None or type(value) is float:
        return value
    if isinstance(value, str):
        try:
            if "_" not in value:  # float() would accept 1_000, which is Python syntax
                return float(value)
        except ValueError:
            pass
        if value.strip().lower() in _NOT_LOGGED:
            return None
        if short := _ABBREVIATED.fullmatch(value):
            return float(f"{short[1]}.{short[2] or 0}") * _UNITS[short[3]]
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            if value > 0:
                return math.inf
            return -math.inf
    raise ValueError(f"{quote_excerpt(str(value))} is not a number")


def quote_excerpt(text: str) -> str:
    """Quotes the start of a damaged text for a message.

    Args:
        text: a text of any length, with any characters.

    Returns:
        At most 40 characters of the text with quotes. Control characters are escaped, so that a
        file cannot change the colours of a terminal.
    """
    if len(text) > 40:
        text = f"{text[:37]}..."
    return repr(text)


def parse_rows(
    path: str,
    run: str | None,
    labels: Mapping[str, str],
    rows: Iterable[tuple[int, Sequence[Any]]],
    problems: list[Problem],
    notes: list[str],
) -> RawLog:
    """Parses the cells of a file, and adds damaged cells to its problems.

    Args:
        path: the file, for messages.
        run: name of the run in a file with several runs, or None.
        labels: what problems call each column, by signal and "step", if the file has steps.
        rows: the line and the cells or JSON values of each row, in the order of the labels. A row
            without a finite step is skipped.
        problems: the problems that the reader of the file has found. The reader adds more while it
            yields rows. The list is changed in place.
        notes: remarks on the file.

    Returns:
        The log. Its problems are in the order of the lines.

    Raises:
        NotJudgedError: more than a tenth of the lines of a column cannot be used.
    """
    columns = _Columns(labels, problems)
    remaining = iter(rows)
    while True:
        before = len(problems)
        block = list(itertools.islice(remaining, _BLOCK))
        if not block:
            break
        if columns.add_plain([cells for _, cells in block]):
            continue
        # The reader adds damage to the problems as it goes on: here between those of the rows.
        of_reader = problems[before:]
        del problems[before:]
        for line, cells in block:
            while of_reader and of_reader[0].line < line:
                problems.append(of_reader.pop(0))
            columns.add_row(line, cells)
        problems += of_reader
    arrays = {name: np.array(column) for name, column in columns.numbers.items()}
    masks = {name: np.array(mask, bool) for name, mask in columns.logged.items()}
    for name, found in columns.damaged.items():
        if name == "eval_loss":
            continue
        usable = len(arrays[min(arrays)])
        if name in masks:
            usable = int(masks[name].sum())
        _refuse_unusable(found, usable)
    if STEP in arrays and any(columns.units):
        arrays[STEP] = _spread_rounded_steps(arrays[STEP], np.array(columns.units))
        notes = [*notes, f"{path}: {ROUNDED}"]
    return RawLog(path, run, arrays, masks, problems, notes)


class _Columns:
    """The columns of a log while its rows are parsed. Arguments as for `parse_rows`."""

    def __init__(self, labels: Mapping[str, str], problems: list[Problem]) -> None:
        self.labels = labels
        self.problems = problems
        self.numbers: dict[str, array[float]] = {}
        self.logged: dict[str, bytearray] = {}
        for name in labels:
            self.numbers[name] = array("d")
            if name in SIGNALS:
                self.logged[name] = bytearray()
        self.units = array("d")
        """Rounding of each step: 1000 for "1K", 0 for an exact step."""
        self.damaged: dict[str, list[Problem]] = {"": [each for each in problems if each.unusable]}

    def add_plain(self, rows: Sequence[Sequence[Any]]) -> bool:
        """Adds rows as whole columns, which takes a fraction of the time of row after row.

        Args:
            rows: the cells of at most `_BLOCK` rows, in the order of the labels.

        Returns:
            False if a cell is no plain number and not empty, or a step is not finite. Then no row
            was added, and `add_row` has to add each of them.
        """
        found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        for name, cells in zip(self.labels, zip(*rows, strict=True), strict=True):
            column = plain_column(cells)
            if column is None or (name == STEP and not np.isfinite(column[0]).all()):
                return False
            found[name] = column
        for name, (numbers, logged) in found.items():
            self.numbers[name].frombytes(numbers.tobytes())
            if name in SIGNALS:
                self.logged[name] += logged.tobytes()
            if name == STEP:
                self.units.frombytes(bytes(numbers.nbytes))
        return True

    def add_row(self, line: int, cells: Sequence[Any]) -> None:
        """Adds a row, and what is damaged in it to the problems.

        Args:
            line: line of the row in the file, or 0 in a format without lines.
            cells: the cells or JSON values, in the order of the labels. A row whose step is
                missing or damaged is not added. A damaged cell of a signal counts as not logged.
        """
        labels = self.labels
        values: dict[str, float | None] = {}
        placeholders: list[str] = []  # names of the columns in which the program printed N/A
        for (name, label), cell in zip(labels.items(), cells, strict=True):
            number: float | None = None
            problem: object = None
            try:
                if name == STEP:
                    number = parse_number(_before_slash(cell))
                else:
                    number = parse_number(cell)
            except ValueError as error:
                problem = error
            if name == STEP and (number is None or not math.isfinite(number)):
                if problem is None:
                    problem = number
                    if number is None:
                        problem = "missing"
                text = f"{label}: {problem}: the row is skipped"
                self._add_damage(name, Problem(line, text, unusable=True))
                return
            if problem is not None and name in SIGNALS:
                text = f"{label}: {problem}: the row is read without {name}"
                self._add_damage(name, Problem(line, text, unusable=name in JUDGED))
            if _is_placeholder(cell):
                placeholders.append(name)
            values[name] = number
        if placeholders and all(values.get(name) is None for name in JUDGED):
            text = f"{labels[placeholders[0]]}: N/A: the row has neither a loss nor a norm"
            self._add_damage(placeholders[0], Problem(line, text, unusable=True))
        for (name, number), cell in zip(values.items(), cells, strict=True):
            if name in SIGNALS:
                self.logged[name].append(number is not None)
            if name == STEP:
                self.units.append(_rounding(cell))
            if number is None:
                number = math.nan
            self.numbers[name].append(number)

    def _add_damage(self, name: str, problem: Problem) -> None:
        """Adds a problem of the column `name`."""
        self.problems.append(problem)
        self.damaged.setdefault(name, []).append(problem)


def plain_column(cells: Sequence[Any]) -> tuple[np.ndarray, np.ndarray] | None:
    """Parses cells as `parse_number` does, if all are numbers or all texts of numbers, or empty.

    Args:
        cells: the n cells of a column.

    Returns:
        The numbers, float64 (n,), NaN for no value; and whether there is a value, bool (n,). None
        for any other cells.
    """
    kinds = set(map(type, cells))
    try:
        if kinds <= {float, int}:
            return np.array(cells, np.float64), np.ones(len(cells), bool)
        if kinds <= {float, int, type(None)}:
            empty = None
        elif kinds == {str} and "_" not in "".join(cells):
            empty = ""
        else:
            return None
        numbers = [math.nan if cell == empty else float(cell) for cell in cells]
    except (ValueError, OverflowError):
        return None
    return np.array(numbers, np.float64), np.array([cell != empty for cell in cells], bool)


ROUNDED = (
    "its steps are rounded (1K, 2.5M): rows with the same number are spread evenly up to the next"
)


def _is_placeholder(cell: Any) -> bool:
    """Whether a program printed N/A in place of a number. An empty cell is just not logged."""
    return isinstance(cell, str) and cell.strip().lower() == "n/a"


def _before_slash(cell: Any) -> Any:
    """The step in a text like "10/1000"."""
    if not isinstance(cell, str):
        return cell
    step, slash, length = cell.partition("/")
    if slash and step.strip().isdecimal() and length.strip().isdecimal():
        return step
    return cell


def _rounding(cell: Any) -> float:
    """The unit to which a text is rounded: 1000 for "1K", 100 for "1.2K", 0 for an exact number."""
    if not isinstance(cell, str):
        return 0.0
    short = _ABBREVIATED.fullmatch(cell)
    if short is None:
        return 0.0
    decimals = len(short[2] or "")
    return _UNITS[short[3]] / 10**decimals


def _spread_rounded_steps(step: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """Spreads rows with the same rounded step evenly up to the next number.

    The rows stay distinct and in order, and each is less than a unit from its step.
    """
    spread = step.copy()
    edges = [0, *(1 + np.flatnonzero(np.diff(step))).tolist(), len(step)]
    for start, stop in itertools.pairwise(edges):
        if unit[start] and stop - start > 1:
            gap = unit[start]
            if stop < len(step) and 0 < step[stop] - step[start] <= unit[start]:
                gap = step[stop] - step[start]
            spread[start:stop] += np.arange(stop - start) * gap // (stop - start)
    return spread


def _refuse_unusable(problems: Sequence[Problem], usable: int) -> None:
    """Raises NotJudgedError if more than a tenth of the lines, and more than one, are unusable.

    One line alone is the usual end of a run that was killed while it wrote.
    """
    count = len(problems)
    if count > 1 and count > _MAX_UNUSABLE * (count + usable):
        first = min(problems, key=operator.itemgetter(0))
        where = "first: "
        if first.line:
            where = f"first in line {first.line}: "
        raise NotJudgedError(
            f"{count:,} of {counted(count + usable, 'line')} cannot be used, {where}{first.text}. "
            "Write plain numbers (1234.5), or name other columns (--column loss=NAME)"
        )


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
        values: dict[str, np.ndarray] = {}
        logged: dict[str, np.ndarray] = {}
        for name in self.values:
            values[name] = self.values[name][where]
            logged[name] = self.logged[name][where]
        return Rows(self.step[where], self.attempt[where], values, logged)


class Attempt(NamedTuple):
    """The part of a run from one start or resume to the next.

    A replay restores the engine's state at each attempt, as the recorded run restored its own.
    """

    source: str
    """Path of the file in which the attempt begins."""
    first_step: float
    resumes_after: int | None
    """The last row before the attempt that is still part of the run: the row's step is below
    `first_step`, and no later attempt replaced the row. None for an attempt from scratch."""


class Unreadable(NamedTuple):
    """A path without a usable trace, and the reason.

    A command over many paths reads the other paths, and lists these at its end.
    """

    path: str
    problem: str
    not_judged: bool = False
    """Whether the path has a log, of which too little can be used for a verdict."""


@dataclass(frozen=True, eq=False)
class Trace:
    """The log of one run, in memory.

    A run that was resumed or rolled back has logged some steps twice. `rows` has both records, so
    that a replay sees what the detectors of the run would have seen. `lineage` has the rows that
    the final weights come from.

        steps      1 2 3 4 5 6        attempt 0
        steps            4 5 6 7 8    attempt 1, resumed after step 3
        replaced         x x x        the steps 4 to 6 of attempt 0

    """

    name: str
    """The path as the user gave it, with `#run` for one run of an export of several runs."""
    rows: Rows
    """All rows in the order of the files, including stale tails; at least one. Records of one
    step that log different signals are one row."""
    attempts: tuple[Attempt, ...]
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
    rounded: bool = False
    """Whether the log rounds its steps, as "12K"."""

    @property
    def signals(self) -> frozenset[str]:
        """Signals that some row logs, such as "loss" and "grad_norm"."""
        logged = self.rows.logged
        return frozenset(name for name in logged if logged[name].any())


def lineage(trace: Trace) -> Rows:
    """Selects the rows of the final run: without stale tails and repeated steps.

    A probe judges these rows, because the final weights do not come from the others.

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
    begins = [0]
    notes: list[str] = []
    without_steps: list[str] = []
    for log in logs:
        begins.append(begins[-1] + log.rows)
        notes += log.notes
        if STEP not in log.numbers:
            without_steps.append(log.path)
    rounded = any(ROUNDED in note for note in notes)
    numbers, masks = _join_columns(logs, begins)
    unit = STEP
    if without_steps:
        unit = "row"
        counts = "its rows are counted, from 0"
        if _are_numbers_of_rows(numbers[EPOCH]):
            unit = EPOCH
            counts = "its epochs are counted"
        for path in without_steps:
            notes.append(f"{path}: it names no step (--column step=NAME): {counts}")
    if unit == EPOCH:
        numbers[STEP] = numbers[EPOCH]
    else:
        length = _count_over_epochs(numbers[STEP], numbers[EPOCH], numbers[LENGTH])
        if length:
            notes.append(
                f"{name}: the steps begin again in each epoch, and are counted over all epochs, "
                f"{length:,.15g} in each"
            )
    row, first, starts = _merge(numbers[STEP], masks, begins)
    step = numbers[STEP][first]
    values = {}
    logged = {}
    for signal in SIGNALS:
        if any(signal in log.logged for log in logs):
            mask = masks[signal]
            values[signal] = np.full(len(first), np.nan, np.float32)
            logged[signal] = np.zeros(len(first), bool)
            with np.errstate(over="ignore"):  # 1e40 becomes Inf in float32, as in training
                values[signal][row[mask]] = numbers[signal][mask]
            logged[signal][row[mask]] = True
    resumed, replaced = _find_resumed_rows(step, starts)
    attempts: list[Attempt] = []
    for start, resumes_after in zip(starts, resumed, strict=True):
        source = logs[bisect.bisect(begins, first[start]) - 1].path
        attempts.append(Attempt(source, float(step[start]), resumes_after))
    for number, attempt in enumerate(attempts[1:], 1):
        notes.append(
            f"{attempt.source}: the run went back (a resume or a rollback): attempt {number} "
            f"begins at {unit} {attempt.first_step:.15g}"
        )
    problems: list[str] = []
    for log in logs:
        for line, text, _ in sorted(log.problems, key=operator.itemgetter(0)):
            place = log.path
            if line:
                place = f"{log.path}, line {line}"
            problems.append(f"{place}: {text}")
    attempt_numbers = np.searchsorted(starts, np.arange(len(step)), side="right") - 1
    repeats = _count_repeats(step, attempt_numbers, logged)
    if repeats:
        text = f"{counted(repeats, 'row')} with the {unit} of the row before"
        problems.append(f"{name}: {text}: several runs, ranks or evaluations are judged as one run")
    return Trace(
        name=name,
        rows=Rows(step, attempt_numbers, values, logged),
        attempts=tuple(attempts),
        replaced=replaced,
        problems=tuple(problems),
        notes=tuple(notes),
        files=len({log.path for log in logs}),
        unit=unit,
        rounded=rounded,
    )


def _count_repeats(step: np.ndarray, attempt: np.ndarray, logged: Mapping[str, np.ndarray]) -> int:
    """Counts rows (n,) with the step and attempt of the row before, and one of its signals."""
    same_signal = np.zeros(max(len(step) - 1, 0), bool)
    for mask in logged.values():
        same_signal |= mask[1:] & mask[:-1]
    same_place = (np.diff(step) == 0) & (np.diff(attempt) == 0)
    return int(np.count_nonzero(same_place & same_signal))


def _join_columns(
    logs: Sequence[RawLog], begins: list[int]
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """The numbers and masks of all files; without a column of steps its rows are counted."""
    rows = begins[-1]
    numbers = {STEP: np.arange(rows, dtype=np.float64)}
    for name in (EPOCH, LENGTH, *SIGNALS):
        numbers[name] = np.full(rows, np.nan)
    masks: dict[str, np.ndarray] = {}
    for signal in SIGNALS:
        masks[signal] = np.zeros(rows, bool)
    for log, begin in zip(logs, begins, strict=False):
        end = begin + log.rows
        for name, column in log.numbers.items():
            numbers[name][begin:end] = column
        for signal, mask in log.logged.items():
            masks[signal][begin:end] = mask
    return numbers, masks


def _are_numbers_of_rows(epoch: np.ndarray) -> bool:
    """Whether a log has one row for each epoch, so that the epoch says where a row is."""
    return len(epoch) > 1 and bool((epoch % 1 == 0).all() and (np.diff(epoch) > 0).all())


def _count_over_epochs(step: np.ndarray, epoch: np.ndarray, length: np.ndarray) -> float:
    """Counts steps that begin again in each epoch over all epochs, in place.

    `length` has the number of batches in an epoch where the log says it, as in "[40/47]", and NaN
    otherwise. Returns the length of an epoch, or 0 if the steps do not begin again.
    """
    rise = np.diff(step)
    rises = rise > 0
    if np.isfinite(length).all() and len(step):
        longest = float(length.max())
        if np.isnan(epoch).any():
            # Without an epoch, a count that falls after it has reached the end begins an epoch.
            usual = longest
            if rises.any():
                usual = float(np.median(rise[rises]))
            ends = (rise <= 0) & (step[:-1] + usual > length[:-1])
            if not ends.any():
                return 0.0
            epoch = np.cumsum([1, *ends.astype(int)]).astype(float)
        later = np.diff(epoch) > 0
        if (epoch % 1).any() or (later & (rise > 0)).any():
            return 0.0  # the count goes on over the epochs
        first = _first_epoch(step, epoch)
        if epoch.max() <= first:
            return 0.0
        step += (epoch - first) * longest
        return longest
    restarts = (rise < 0) & (np.diff(epoch) > 0)
    if not (restarts.any() and rises.any() and (epoch % 1 == 0).all()):
        return 0.0
    longest = float(np.ptp(step) + np.median(rise[rises]))
    step += (epoch - epoch.min()) * longest
    return longest


def _first_epoch(step: np.ndarray, epoch: np.ndarray) -> float:
    """The number of the first epoch of the program, 0 or 1, which a resumed run may not log.

    Programs that count their batches from 0 count their epochs from 0 too.
    """
    if epoch.min() <= 1:
        return float(epoch.min())
    if step.min() > 0:
        return 1.0
    return 0.0


def _merge(
    step: np.ndarray, logged: Mapping[str, np.ndarray], begins: Container[int]
) -> tuple[np.ndarray, list[int], list[int]]:
    """Merges records of one attempt and step that log different signals.

    `begins` has the first record of each file. Returns the row of each record, int (n,); the first
    record of each row; the first row of each attempt.
    """
    if (np.diff(step) > 0).all():
        return np.arange(len(step)), list(range(len(step))), [0]
    bits = np.zeros(len(step), np.int64)
    for name, mask in logged.items():
        bits |= mask.astype(np.int64) << SIGNALS.index(name)
    rows: list[int] = []
    first: list[int] = []
    starts = [0]
    signals: list[int] = []  # bits of each row
    row_at: dict[float, int] = {}  # step -> its last row in the attempt
    last: dict[int, float] = {}  # bit of a judged signal -> its last step in the attempt
    file_begins = False
    for record, (at, own) in enumerate(zip(step.tolist(), bits.tolist(), strict=True)):
        file_begins = file_begins or record in begins
        judged = _JUDGED_BITS[own & 3]
        if judged:
            reached = max(last.get(bit, -math.inf) for bit in judged)
            if at < reached or (file_begins and at == reached):
                starts.append(len(first))
                row_at, last = {}, {}
            file_begins = False
            for bit in judged:
                last[bit] = at
        row = row_at.get(at)
        if row is None or not own or own & signals[row]:
            row = row_at[at] = len(first)
            first.append(record)
            signals.append(own)
        signals[row] |= own
        rows.append(row)
    if len(starts) > _MAX_ATTEMPTS:
        raise TraceError(
            f"the steps decrease {len(starts) - 1:,} times. This looks like several runs or ranks "
            "in one file, or a file in reverse order. Write one file per run, with increasing steps"
        )
    return np.array(rows), first, starts


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
        remaining = np.flatnonzero(~replaced[:start])
        if remaining.size:
            resumed.append(int(remaining[-1]))
        else:
            resumed.append(None)
    return resumed, replaced
