"""Reads the records of each format: JSON Lines, JSON documents, TensorBoard."""

from __future__ import annotations

import functools
import itertools
import json
import mmap
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from pydantic_core import from_json

from healcore import adapter_registry, regular_file
from healcore.tools.traces.columns import (
    EPOCH,
    EPOCH_LENGTH,
    JUDGED_SIGNALS,
    SIGNALS,
    STEP,
    RawLog,
    RowProblem,
    TraceError,
    UnjudgeableLog,
    open_text,
    parse_number,
    parse_rows,
    plain_column,
    quote_excerpt,
)
from healcore.tools.traces.names import find_columns, is_known, is_step, normalize
from healcore.tools.traces.printed import Fields, Records

MAX_LAYOUTS = 1000
"""Sets of keys that are remembered. A file in which each record has other keys needs no memory."""
LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')


def json_lines(path: str, problems: list[RowProblem]) -> Records:
    """Reads JSON Lines, the format of most loggers.

    Args:
        path: the file. Its last line may be cut off, because the run was killed.
        problems: gets a problem for each damaged line, which is skipped.

    Yields:
        Line number from 1, and the object of the line.
    """
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text:
                continue
            try:
                value = json_value(text)
            except (ValueError, RecursionError):
                cut = ""
                if not line.endswith(("\n", "\r")):
                    cut = " (the last line is truncated)"
                message = f"not JSON{cut}: {quote_excerpt(text)}: skipped"
                # A text without braces is no record: programs print it between records.
                is_record = "{" in text or "}" in text
                problems.append(RowProblem(number, message, unusable=is_record))
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                text = f"not a JSON object: {quote_excerpt(text)}: skipped"
                problems.append(RowProblem(number, text, unusable=True))


def json_value(text: str) -> Any:
    """The value of `json.loads`, and its errors.

    pydantic's parser takes a third of the time of `json`. It accepts no text that `json` rejects,
    and rejects some texts that `json` accepts: half of a surrogate pair, deep nesting. pydantic
    2.18 reads escaped characters wrongly, so `json` reads these.
    """
    if "\\u" in text:
        return json.loads(text)
    try:
        return from_json(text)
    except ValueError:
        return json.loads(text)


def json_document(path: str, problems: list[RowProblem]) -> Records:
    """Reads a JSON document with a list of records.

    Args:
        path: the file. The document is the list itself, or an object with the list "log_history"
            (`trainer_state.json` of Hugging Face's Trainer).
        problems: gets a problem for each element of the list that is no record.

    Yields:
        0, because the records have no line, and the record.

    Raises:
        TraceError: the document is damaged.
    """
    with open_text(path) as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"the document is damaged: {error}") from None
    if isinstance(content, dict):
        content = content.get("log_history", ())
    for value in content:
        if isinstance(value, dict):
            yield 0, value
        else:
            problems.append(RowProblem(0, f"not a record: {quote_excerpt(str(value))}: skipped"))


def scalars(path: str, problems: list[RowProblem]) -> Records:
    """Reads the scalars of a TensorBoard event file.

    Args:
        path: the file. It may be truncated, because the run was killed.
        problems: gets a problem for each damaged record, and for an end that cannot be read.

    Yields:
        0, because the file has no lines, and for each scalar the record
        {"step": step, tag: value}.

    Raises:
        TraceError: tensorboard is not installed.
    """
    try:
        adapter_registry.require("tensorboard", "tensorboard")
    except adapter_registry.MissingExtraError as error:
        raise TraceError(f"it is a TensorBoard event file: {error}") from None
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2

    with (
        open(path, "rb", opener=regular_file.opener) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        end = 0
        size = len(data)
        for end, record in _events(data):
            try:
                event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
            except DecodeError:
                problems.append(
                    RowProblem(0, f"the record that ends at byte {end:,} is not an event")
                )
                continue
            for value in event.summary.value:
                try:
                    number = _scalar(value)
                except (TypeError, ValueError, KeyError, OverflowError) as error:
                    what = f"'{value.tag[:60]}' at byte {end:,} is not a number"
                    problems.append(RowProblem(0, f"{what}: {str(error)[:100]}"))
                    continue
                if number is not None:
                    yield 0, {"step": event.step, value.tag: number}
        if end < size:
            rest = f"the last {size - end:,} bytes cannot be read"
            problems.append(RowProblem(0, f"truncated or damaged at byte {end:,}: {rest}"))


def _events(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Yields the end and the content of each record, up to the first damage.

    A record has its length (8 bytes), the checksum of the length, the content, and its checksum.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    at = 0
    while at + 16 <= len(data):
        head = data[at : at + 8]
        start = at + 12
        length = int.from_bytes(head, "little")
        content = data[start : start + length]
        checksum = data[start + length : start + length + 4]
        for part, given in ((head, data[at + 8 : start]), (content, checksum)):
            if masked_crc32c(part) != int.from_bytes(given, "little"):
                return
        at = start + length + 4
        yield at, content


def _scalar(value: Any) -> float | None:
    """The number of a value of a summary, or None for an image, a text or a larger tensor."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor":
        return None
    for dimension in value.tensor.tensor_shape.dim:
        if dimension.size != 1:
            return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    if array.size == 1 and array.dtype.kind in "fiu":
        return float(array.reshape(()))
    return None


def _flatten(record: Fields) -> Fields:
    """Flattens one level of nesting: {"train": {"loss": 1}} becomes {"train/loss": 1}."""
    if dict not in set(map(type, record.values())):
        return record
    flat: Fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            for inner, number in value.items():
                flat[f"{key}/{inner}"] = number
        else:
            flat[key] = value
    return flat


def is_typed_step(record: Fields) -> bool:
    """Whether a record has the type of a step, as in healcore's metrics.

    Args:
        record: a record of `json_lines`. A file of metrics also has records of saves and faults,
            whose numbers belong to no step.
    """
    return "step" in (record.get("type"), record.get("kind"))


def is_no_summary(record: Fields) -> bool:
    """Whether a record is not the last record of a Trainer, whose train_loss is a mean.

    Args:
        record: a record of "log_history". The mean over the whole run would look like a jump of the
            loss at the last step.
    """
    return "train_runtime" not in record


_RUN_NAME = re.compile(
    r"(?:(?:run|trial|experiment|job)_)?(?:name|id|key)|run|trial|experiment|uuid|model"
)
"""Columns that identify a run. In the log of one run they have one value."""
_RUN_FACT = re.compile(
    r"state|status|user|created(?:_at)?|runtime|duration|start_time|end_time|sweep|tags|notes|group"
    r"|hostname|source_(?:name|type)"
)
"""Columns that trackers add to a table of runs."""
_TABLE_OF_RUNS = (
    "it is a table of runs, with one run in each row (column '{}'), and no curve of a run. Export "
    "the history of a run: in W&B the chart as CSV, or run.history() in Python"
)


@functools.lru_cache(maxsize=4096)
def is_kept(name: str) -> bool:
    """Whether a field of a record is read: the step, a signal, or what identifies a run.

    Args:
        name: the key of the field. Records may have hundreds of fields, which would need a
            gigabyte of memory in a long log.
    """
    return name == EPOCH_LENGTH or is_known(name) or bool(_RUN_NAME.fullmatch(normalize(name)))


def refuse_table_of_runs(
    names: Iterable[str], cells_of: Callable[[str], Sequence[Any]], step: str | None
) -> None:
    """Raises UnjudgeableLog if each row is another run, so that the loss of the rows is no curve.

    A table of runs names another run in each row. A log may do so too, with an id of each line, but
    its steps increase.

    Args:
        names: the names of all columns, also of columns that are not read.
        cells_of: returns the cells of a column, with None where a row has none.
        step: name of the column of steps, or None.

    Raises:
        UnjudgeableLog: the rows are runs.
    """
    facts = 0
    for name in names:
        if _RUN_FACT.fullmatch(normalize(name)):
            facts += 1
    is_tracker = facts >= 3
    if not is_tracker and step and _increases(cells_of(step)):
        return
    for key in names:
        if not _RUN_NAME.fullmatch(normalize(key)):
            continue
        cells = cells_of(key)
        runs: set[str] = set()
        for cell in cells:
            if isinstance(cell, str) and cell.strip() and not cell.strip().isdecimal():
                runs.add(cell)
        # Runs that differ in their seed may have one name.
        least = max(1, 0.9 * len(cells))
        if is_tracker:
            least = 0
        if len(runs) > least:
            raise UnjudgeableLog(_TABLE_OF_RUNS.format(key))


def _increases(values: Sequence[Any]) -> bool:
    """Whether values are numbers that increase."""
    plain = plain_column(values)
    if plain is not None:
        known = plain[0][plain[1]]
    else:
        try:
            numbers = [parse_number(value) for value in values]
        except ValueError:
            return False
        known = np.array([number for number in numbers if number is not None], np.float64)
    return len(known) > 2 and bool((known[:-1] < known[1:]).all())


class _Steps:
    """The fields of many records that are kept.

    A record is a tuple of its values, which Python's garbage collector soon leaves alone. It would
    visit the dictionary of each record again and again.

    Args:
        is_kept: whether the fields of a key are kept.
    """

    def __init__(self, is_kept: Callable[[str], bool]) -> None:
        self._is_kept = is_kept
        self.layouts: dict[tuple[str, ...], tuple[tuple[str, ...], int]] = {}
        """The keys of a record -> these keys, the kept ones first, and the number of the kept."""
        self.names: dict[str, None] = {}
        """The keys of all records, in the order of the file."""
        self.lines: list[int] = []
        self.engines: list[str] = []
        self.keys: list[tuple[str, ...]] = []
        """The keys of each record, the kept ones first. Most records share the tuple of another
        one."""
        self.values: list[tuple[Any, ...]] = []
        """The values of the kept keys, and None at the end."""

    def add(self, line: int, engine: str, fields: Fields) -> None:
        """Adds a record.

        Args:
            line: line of the record, or 0 in a format without lines.
            engine: name of the engine, or an empty string in a log with one engine.
            fields: the record, without nesting.
        """
        layout = tuple(fields)
        found = self.layouts.get(layout)
        if found is None:
            self.names.update(dict.fromkeys(fields))
            kept = tuple(filter(self._is_kept, fields))
            found = kept, len(kept)
            if len(self.layouts) < MAX_LAYOUTS:
                found = (*kept, *itertools.filterfalse(self._is_kept, fields)), len(kept)
                self.layouts[layout] = found
        keys, number = found
        self.lines.append(line)
        self.engines.append(engine)
        self.keys.append(keys)
        self.values.append((*map(fields.__getitem__, keys[:number]), None))

    def column(self, name: str) -> list[Any]:
        """Reads one key of all records.

        Args:
            name: the key, as the records write it.

        Returns:
            The value in each record, or None where a record lacks the key.
        """
        read = _Reader((name,))
        return [read(*each)[0] for each in zip(self.keys, self.values, strict=True)]


class _Reader:
    """Reads the values of some keys of records, with None for a missing key.

    Consecutive records usually share one tuple of keys. So the places of the keys in the last tuple
    are remembered.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self._places: tuple[tuple[str, ...], list[int]] = ((), [])

    def __call__(self, keys: tuple[str, ...], values: tuple[Any, ...]) -> list[Any]:
        known, places = self._places
        if known is not keys or not places:
            places = []
            for name in self._names:
                if name in keys:
                    places.append(keys.index(name))
                else:
                    places.append(-1)  # the None at the end of the values
            self._places = keys, places
        return list(map(values.__getitem__, places))


def read_records(
    path: str,
    read: Callable[[str, list[RowProblem]], Records],
    is_row: Callable[[Fields], bool],
    columns: Mapping[str, str],
) -> list[RawLog]:
    """Reads the logs in a file: one log, or one for each optimizer in healcore's metrics.

    Args:
        path: the file.
        read: yields the records of the file, such as `json_lines`.
        is_row: selects the records that are steps, such as `is_typed_step`.
        columns: the keys that the user chose, by signal or "step".

    Returns:
        The logs, at least one.

    Raises:
        TraceError: no record has a loss or a gradient norm, or two keys may be the same signal.
        UnjudgeableLog: the records are runs, or too many of them are damaged.
    """
    problems: list[RowProblem] = []
    chosen = set(columns.values())
    steps = _Steps(lambda key: key in chosen or is_kept(key))
    for line, record in read(path, problems):
        if is_row(record):
            fields = _flatten(record)
            engine = ""
            if is_row is is_typed_step:
                engine = str(fields.get("engine", ""))
            steps.add(line, engine, fields)
    if not steps.names:
        first = ""
        if problems:
            first = f": line {problems[0].line}: {problems[0].text}"
        raise TraceError(f"it has no record that could be read{first}")
    keys, notes = find_columns(list(steps.names), columns)
    refuse_table_of_runs(steps.names, steps.column, keys.get(STEP))
    notes = [f"{path}: {note}" for note in notes]
    if EPOCH_LENGTH in steps.names:
        keys[EPOCH_LENGTH] = EPOCH_LENGTH
    labels = {name: f"'{key}'" for name, key in keys.items()}
    engines = list(dict.fromkeys(filter(None, steps.engines)))
    runs: list[str | None] = [None]
    if len(engines) > 1:
        runs = [*engines]
    logs = []
    for run in runs:
        rows = _rows_of(steps, keys, run)
        logs.append(parse_rows(path, run, labels, rows, list(problems), list(notes)))
    return logs


def _rows_of(
    steps: _Steps, keys: Mapping[str, str], engine: str | None
) -> Iterator[tuple[int, list[Any]]]:
    """Yields the rows of one log: the line, and a cell for each of `keys`.

    A record is a row if it has a signal, or if it is a record of a step that lacks its signals:
    some programs leave out what is NaN. Such a record has no key that steps do not have.

    Args:
        steps: the records of the file.
        keys: the key of each signal and of the step, by name.
        engine: the optimizer of the log, or None for the records of all.
    """
    step_at = None
    if STEP in keys:
        step_at = list(keys).index(STEP)
    signals = {keys[name] for name in SIGNALS if name in keys}
    judged = {keys[name] for name in JUDGED_SIGNALS if name in keys}
    places = {keys[name] for name in (STEP, EPOCH) if name in keys}
    of_steps: set[str] = set()
    for names, _ in steps.layouts.values():
        if not judged.isdisjoint(names):
            of_steps.update(names)
    read_cells = _Reader([*keys.values()])
    step: Any = None
    is_row: dict[tuple[str, ...], bool] = {}
    every = zip(steps.lines, steps.engines, steps.keys, steps.values, strict=True)
    for line, own, names, values in every:
        if names not in is_row:
            has_place = not places or not places.isdisjoint(names)
            lacks_signals = has_place and of_steps.issuperset(names)
            is_row[names] = lacks_signals or not signals.isdisjoint(names)
        if engine not in (None, own) or not is_row[names]:
            continue
        cells = read_cells(names, values)
        if step_at is not None:
            if cells[step_at] is None:
                # A record of another kind may name its step in another way. An evaluation
                # without a step belongs to the step before it.
                for key, value in zip(names, values, strict=False):
                    if is_step(key):
                        cells[step_at] = value
                        break
                if cells[step_at] is None and judged.isdisjoint(names):
                    cells[step_at] = step
            step = cells[step_at]
        yield line, cells
