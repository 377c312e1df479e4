"""Reads the records of each format: CSV, JSON Lines, JSON documents, TensorBoard.

A reader yields the line and the fields of each record, and adds what it cannot use to a list of
problems.
"""

from __future__ import annotations

import csv
import itertools
import json
import re
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple, TextIO

import numpy as np
from pydantic_core import from_json

from healcore import adapter_registry, regular_file
from healcore.console import counted
from healcore.tools.traces.names import EPOCH, SIGNALS, STEP, TraceError, has_role

Fields = dict[str, Any]
"""A record: cells or JSON values by name, without nesting."""

Records = Iterator[tuple[int, Fields]]
"""Line number (0 in a format without lines) and fields of each record."""

_NOT_LOGGED = frozenset({"", "none", "null", "na", "n/a", "<na>"})
"""Texts of cells without a logged value. "nan" is a value."""
_PLACE = re.compile(r"\s*(\d+)\s*/\s*\d+\s*")
"""A step or an epoch like "10/1000"."""


class UnjudgeableLog(TraceError):
    """A log can be read, but too little of it to judge the run.

    For example, a fifth of the cells of the loss are damaged. A run that diverged in these rows
    would look healthy in the other rows.
    """


class RowProblem(NamedTuple):
    """Content of a file that could not be used, with its place.

    Commands print problems with the path of the file, so that a user can look at the line.
    """

    line: int
    """Line from 1, or 0 in a format without lines."""
    text: str
    """Description."""
    unusable: bool = False
    """Whether the line may have had a loss or a norm. A log with many such lines is not judged."""

    def describe(self, path: str) -> str:
        """The text with its place in the file `path`."""
        if self.line:
            path += f", line {self.line}"
        return f"{path}: {self.text}"


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
        value: a text, a number or None.

    Returns:
        The number, which may be NaN or infinity, or None for a text such as "" or "N/A". It is 10
        for "10/1000".

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
        if place := _PLACE.fullmatch(value):
            return float(place[1])
        if value.strip().lower() in _NOT_LOGGED:
            return None
    elif isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:  # a whole number beyond float64
            return float(str(value))  # Inf with its sign
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


def plain_table(path: str) -> tuple[list[str], int, np.ndarray] | None:
    """Reads a CSV file whose cells all are numbers, in a fraction of the time of `table_rows`.

    Args:
        path: the file.

    Returns:
        The names of the columns, the first line below them, and the numbers, float64 (rows,
        columns). None for any other file, which `table_rows` reads, or says what is wrong with it.
    """
    with open_text(path) as file, warnings.catch_warnings(action="ignore"):
        try:
            rows = _csv_rows(file)
            names = _header(next(filter(None, rows)))
            separator = rows.dialect.delimiter
            table = np.loadtxt(file, delimiter=separator, comments=None, quotechar='"', ndmin=2)
        except (ValueError, csv.Error, StopIteration):
            return None
    if not len(table) or table.shape[1] != len(names):
        return None
    return names, rows.line_num + 1, table


def table_rows(path: str, problems: list[RowProblem]) -> Records:
    """Reads the rows of a CSV file with a header.

    A program that was restarted may have written another header; it names the cells below it.

    Args:
        path: the file. Its columns are separated by commas, semicolons, tabs or bars.
        problems: gets a problem for each row of another width than its header.

    Yields:
        The last line of a row, and its cells by name, with None for a column of an earlier header
        that the last header lacks.

    Raises:
        TraceError: the file has no header, a header has a name twice, or a cell does not end.
    """
    with open_text(path) as file:
        rows = _csv_rows(file)
        names: list[str] = []
        absent: Fields = {}
        try:
            for cells in rows:
                if len(cells) < 2 and not "".join(cells).strip():
                    continue
                if not names or (not cells[0][:1].isdigit() and _is_header(cells)):
                    names = _header(cells)
                    absent |= dict.fromkeys(names)
                    continue
                if len(cells) >= len(names) and not any(cells[len(names) :]):
                    yield rows.line_num, absent | dict(zip(names, cells, strict=False))
                    continue
                width = f"{counted(len(cells), 'cell')} where the header has {len(names)}"
                unusable = any(map(_is_number, cells))  # a line of text has no number
                problems.append(RowProblem(rows.line_num, f"{width}: the row is skipped", unusable))
        except csv.Error as error:  # a cell of more than 131,072 characters
            raise TraceError(f"this is not a table: {error}, line {rows.line_num}") from None


def _csv_rows(file: TextIO) -> Any:
    """The csv reader of a table, with the separator that its first line has most often."""
    first_line = re.sub('"[^"]*"', "", next(filter(str.strip, file), ""))
    file.seek(0)
    return csv.reader(file, delimiter=max(",;\t|", key=first_line.count))


def _is_header(cells: list[str]) -> bool:
    """Whether a row below the header of a table is a header."""
    return not any(map(_is_number, cells)) and has_role(cells, (STEP, EPOCH, *SIGNALS))


def _header(cells: list[str]) -> list[str]:
    """The names of the columns. Raises TraceError for data, or a name that is there twice."""
    names = [cell.strip() for cell in cells]
    if all(map(_is_number, names)):
        raise TraceError(
            f"its first line is data, not a header: '{','.join(names)[:60]}'. Write the names of "
            "the columns above it: step,loss,grad_norm"
        )
    seen: set[str] = set()
    for name in filter(None, names):
        if name in seen:
            raise TraceError(f"two columns have the name '{name}': rename one of them")
        seen.add(name)
    return names


def _is_number(cell: str) -> bool:
    """Whether a cell has a number."""
    try:
        return parse_number(cell) is not None
    except ValueError:
        return False


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
            value = json_of_line(line)
            if isinstance(value, dict):
                if line.count("{") > 1:
                    value = flatten(value)
                yield number, value
            elif line.strip():
                # A text without braces is no record: programs print it between records.
                is_record = value is not None or "{" in line or "}" in line
                message = f"not a JSON object: {quote_excerpt(line.strip())}: skipped"
                problems.append(RowProblem(number, message, unusable=is_record))


def json_of_line(line: str) -> Any:
    """Parses a line of JSON Lines.

    pydantic's parser takes a third of the time of `json`. It accepts no text that `json` rejects,
    and rejects some texts that `json` accepts: half of a surrogate pair, deep nesting. pydantic
    2.18 reads escaped characters wrongly, so `json` reads these.

    Args:
        line: any text.

    Returns:
        The value, or None for a text that is not JSON.
    """
    try:
        if "\\u" not in line:
            return from_json(line)
    except ValueError:
        pass
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def typed_steps(path: str, problems: list[RowProblem]) -> Records:
    """Reads the records of steps in healcore's metrics.

    Args:
        path: a file of JSON Lines. It also has records of saves and faults, whose numbers belong
            to no step.
        problems: as for `json_lines`.

    Yields:
        The records of `json_lines` that have the type of a step.
    """
    for line, record in json_lines(path, problems):
        if is_typed_step(record):
            record.pop("run", None)  # the id of a process: a resumed run has several
            yield line, record


def is_typed_step(record: Fields) -> bool:
    """Whether a record has the type of a step, as in healcore's metrics.

    Args:
        record: a record of `json_lines`.
    """
    return "step" in (record.get("type"), record.get("kind"))


def json_document(path: str, problems: list[RowProblem]) -> Records:
    """Reads a JSON document with a list of records.

    Args:
        path: the file. The document is the list itself, or an object with the list "log_history"
            (`trainer_state.json` of Hugging Face's Trainer).
        problems: gets a problem for each element of the list that is no record.

    Yields:
        0, because the records have no line, and the record. The last record of a Trainer is left
        out: the mean over the whole run would look like a jump of the loss at the last step.

    Raises:
        TraceError: the document is damaged.
    """
    with open_text(path) as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"the document is damaged: {error}") from None
    if isinstance(content, dict):
        content = content.get("log_history") or ()
    for value in content:
        if not isinstance(value, dict):
            problems.append(RowProblem(0, f"not a record: {quote_excerpt(str(value))}: skipped"))
        elif "train_runtime" not in value:
            yield 0, flatten(value)


def flatten(record: Fields) -> Fields:
    """Flattens one level of nesting: {"train": {"loss": 1}} becomes {"train/loss": 1}.

    Args:
        record: an object of JSON.

    Returns:
        The record, or a flat copy.
    """
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
    from tensorboard.compat.proto import event_pb2
    from tensorboard.compat.tensorflow_stub import errors, pywrap_tensorflow

    records = pywrap_tensorflow.PyRecordReader_New(path)
    for number in itertools.count():
        try:
            records.GetNext()
            event = event_pb2.Event.FromString(records.record())  # pyright: ignore[reportAttributeAccessIssue]
        except errors.OutOfRangeError:
            return
        except Exception as error:  # damaged bytes may raise any error
            text = f"truncated or damaged after {number:,} records, and not read from there"
            problems.append(RowProblem(0, f"{text}: {str(error)[:100]}"))
            return
        for value in event.summary.value:
            try:
                scalar = _scalar(value)
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                text = f"'{value.tag[:60]}' at step {event.step} is not a number"
                problems.append(RowProblem(0, f"{text}: {str(error)[:100]}"))
                continue
            if scalar is not None:
                yield 0, {"step": event.step, value.tag: scalar}


def _scalar(value: Any) -> float | None:
    """The number of a value of a summary, or None for an image, a text or a larger tensor."""
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or any(each.size != 1 for each in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    if array.dtype.kind not in "fiu":
        return None
    return float(array.item())
