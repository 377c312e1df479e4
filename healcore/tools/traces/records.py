"""Reads files of records: JSON Lines, JSON documents, console output, TensorBoard events."""

from __future__ import annotations

import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from healcore import extras, regular_file
from healcore.tools.traces.logs import (
    STEP,
    Problem,
    RawLog,
    TraceError,
    open_text,
    parse_rows,
    quote_excerpt,
)
from healcore.tools.traces.names import is_known, resolve

Fields = dict[str, Any]
"""A record: JSON values by name."""

Records = Iterator[tuple[int, Fields]]
"""Line number (0 in a format without lines) and fields of each record."""

_MAX_PRINTED = 1 << 12
"""Largest number of characters of a printed dict."""
LOG_HISTORY = re.compile(r'"log_history"\s*:\s*\[')
_PYTHON = re.compile(
    r"""("[^"\\]*")|'([^'\\]*)'|\b(nan|inf|None|True|False)\b|(?:np\.\w+|tensor)\(|\.?\)"""
)
_JSON_NAMES = {"nan": "NaN", "inf": "Infinity", "None": "null", "True": "true", "False": "false"}


def json_lines(path: str, problems: list[Problem]) -> Records:
    """Yields line number and object for each line of JSON. Skips damaged lines."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            text = line.strip()
            if not text:
                continue
            try:
                value = json.loads(text)
            except (ValueError, RecursionError):
                cut = "" if line.endswith(("\n", "\r")) else " (the last line is truncated)"
                problems.append((number, f"not JSON{cut}: {quote_excerpt(text)}: skipped"))
                continue
            if isinstance(value, dict):
                yield number, value
            else:
                problems.append((number, f"not a JSON object: {quote_excerpt(text)}: skipped"))


def console_lines(path: str, problems: list[Problem]) -> Records:
    """Yields line number and record for each line that ends in a dict as Python prints it."""
    with open_text(path) as file:
        for number, line in enumerate(file, 1):
            record = printed_record(line)
            if record is not None:
                yield number, record
            elif "{'" in line:
                problems.append((number, f"not a dict: {quote_excerpt(line)}: skipped"))


def printed_record(line: str) -> Fields | None:
    """Returns the dict at the end of a printed line, after a progress bar or other text."""
    _, found, rest = line.rstrip().partition("{'")
    if not found or not rest.endswith("}") or len(rest) > _MAX_PRINTED:
        return None
    try:
        return json.loads(_PYTHON.sub(_to_json, found + rest))
    except (ValueError, RecursionError):
        return None


def _to_json(token: re.Match[str]) -> str:
    quoted, text, name = token.groups()
    return quoted or (_JSON_NAMES.get(name, "") if text is None else json.dumps(text))


def json_document(path: str, problems: list[Problem]) -> Records:
    """Yields each record of a JSON document.

    The document is a list of records, or an object with the list "log_history"
    (`trainer_state.json` of Hugging Face's Trainer). Raises TraceError for a damaged document.
    """
    with open_text(path) as file:
        try:
            content = json.load(file)
        except (ValueError, RecursionError) as error:
            raise TraceError(f"the document is damaged: {error}") from None
    for value in content.get("log_history", ()) if isinstance(content, dict) else content:
        if isinstance(value, dict):
            yield 0, value
        else:
            problems.append((0, f"not a record: {quote_excerpt(str(value))}: skipped"))


def scalars(path: str, problems: list[Problem]) -> Records:
    """Yields every scalar of a TensorBoard event file as a record: {"step": step, tag: value}.

    Raises TraceError if tensorboard is not installed.
    """
    try:
        extras.require("tensorboard", "tensorboard")
    except extras.MissingExtraError as error:
        raise TraceError(f"it is a TensorBoard event file: {error}") from None
    from google.protobuf.message import DecodeError
    from tensorboard.compat.proto import event_pb2

    with (
        open(path, "rb", opener=regular_file.opener) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        end, size = 0, len(data)
        for end, record in _events(data):
            try:
                event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
            except DecodeError:
                problems.append((0, f"the record that ends at byte {end:,} is not an event"))
                continue
            for value in event.summary.value:
                try:
                    number = _scalar(value)
                except (TypeError, ValueError, KeyError, OverflowError) as error:
                    what = f"'{value.tag[:60]}' at byte {end:,} is not a number"
                    problems.append((0, f"{what}: {str(error)[:100]}"))
                    continue
                if number is not None:
                    yield 0, {"step": event.step, value.tag: number}
        if end < size:
            rest = f"the last {size - end:,} bytes cannot be read"
            problems.append((0, f"truncated or damaged at byte {end:,}: {rest}"))


def _events(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
    """Yields the end and the content of each record, up to the first damage.

    A record has its length (8 bytes), the checksum of the length, the content, and its checksum.
    """
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    at = 0
    while at + 16 <= len(data):
        head = data[at : at + 8]
        start, length = at + 12, int.from_bytes(head, "little")
        content, checksum = data[start : start + length], data[start + length : start + length + 4]
        for part, given in ((head, data[at + 8 : start]), (content, checksum)):
            if masked_crc32c(part) != int.from_bytes(given, "little"):
                return
        at = start + length + 4
        yield at, content


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or any(size.size != 1 for size in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiu" else None


# -- rows ------------------------------------------------------------------------------------------


def _flatten(record: Fields) -> Fields:
    """Flattens one level of nesting: {"train": {"loss": 1}} becomes {"train/loss": 1}."""
    if dict not in set(map(type, record.values())):
        return record
    flat: Fields = {}
    for key, value in record.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": number for inner, number in value.items()})
        else:
            flat[key] = value
    return flat


def is_typed_step(record: Fields) -> bool:
    """Whether a record has the type of a step, as in healcore's metrics."""
    return "step" in (record.get("type"), record.get("kind"))


def is_no_summary(record: Fields) -> bool:
    """Whether a record is not the last record of a Trainer, whose train_loss is a mean."""
    return "train_runtime" not in record


def read_records(
    path: str,
    read: Callable[[str, list[Problem]], Records],
    is_step: Callable[[Fields], bool],
    columns: Mapping[str, str],
) -> list[RawLog]:
    """Reads the logs in a file: one log, or one for each optimizer in healcore's metrics.

    `read` yields the records, of which `is_step` selects the steps. Raises TraceError if no record
    has a loss or a gradient norm, or two keys may be the same signal.
    """
    problems: list[Problem] = []
    names: dict[str, None] = {}  # a set that keeps the order of the file
    engines: dict[str, None] = {}
    steps: list[tuple[int, str, Fields]] = []
    chosen = set(columns.values())
    for line, record in read(path, problems):
        if is_step(record):
            fields = _flatten(record)
            names.update(dict.fromkeys(fields))
            engine = str(fields.get("engine", "")) if is_step is is_typed_step else ""
            engines |= {engine: None} if engine else {}
            kept = {key: fields[key] for key in fields if key in chosen or is_known(key)}
            steps.append((line, engine, kept))
    if not names:
        first = f": line {problems[0][0]}: {problems[0][1]}" if problems else ""
        raise TraceError(f"it has no record that could be read{first}")
    keys, notes = resolve(list(names), columns)
    notes = [f"{path}: {note}" for note in notes]
    labels = {name: f"'{key}'" for name, key in keys.items()}

    def rows(engine: str | None) -> Iterator[tuple[int, list[Any]]]:
        for line, own, fields in steps:
            cells = [fields.get(key) for key in keys.values()]
            if engine in (None, own) and any(
                cell is not None for name, cell in zip(keys, cells, strict=True) if name != STEP
            ):
                yield line, cells

    runs = list(engines) if len(engines) > 1 else [None]
    return [parse_rows(path, run, labels, rows(run), list(problems), list(notes)) for run in runs]
