"""Reads TensorBoard event files with TensorBoard's own reader (extra `tensorboard`)."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from typing import Any

from healcore import extras, regular_file
from healcore.tools.traces.columns import Findings, TraceError

_FRAME_BYTES = 16
"""Size of the length and the two checksums of a record."""


def check_installed() -> None:
    """Raises TraceError if tensorboard is not installed."""
    try:
        extras.require("tensorboard", "tensorboard")
    except extras.MissingExtraError:
        raise TraceError(
            "it is a TensorBoard event file, and tensorboard is not installed in this environment. "
            "In a checkout of healcore run: pip install '.[tensorboard]'"
        ) from None


def scalars(path: str, findings: Findings) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields every scalar as a separate record: {"step": step, tag: value}.

    Counts the bytes, because the reader stops silently at a truncated record or a wrong checksum.
    """
    from google.protobuf.message import DecodeError
    from tensorboard.backend.event_processing.event_file_loader import RawEventFileLoader
    from tensorboard.compat.proto import event_pb2

    end = 0
    for record in _whole_records(path, RawEventFileLoader(path).Load()):
        end += len(record) + _FRAME_BYTES
        try:
            event = event_pb2.Event.FromString(record)  # pyright: ignore[reportAttributeAccessIssue]
        except DecodeError:
            findings.problem(path, 0, f"the record that ends at byte {end:,} is not an event")
            continue
        for value in event.summary.value:
            try:
                number = _scalar(value)
            except (TypeError, ValueError, KeyError, OverflowError) as error:
                text = f"'{value.tag[:60]}' at byte {end:,} is not a number: {str(error)[:100]}"
                findings.problem(path, 0, text)
                continue
            if number is not None:
                yield 0, {"step": event.step, value.tag: number}
    size = os.path.getsize(path)
    if end < size:
        text = f"truncated or damaged at byte {end:,}: the last {size - end:,} bytes cannot be read"
        findings.problem(path, 0, text)


def _whole_records(path: str, records: Iterator[bytes]) -> Iterator[bytes]:
    """Yields the records up to the first record that is longer than the rest of the file.

    The reader would allocate the declared length of such a record, up to 2**64 bytes.
    """
    with (
        open(path, "rb", opener=regular_file.opener) as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
    ):
        at, size = 0, len(data)
        while at + int.from_bytes(data[at : at + 8], "little") + _FRAME_BYTES <= size:
            record = next(records, None)
            if record is None:
                return
            at += len(record) + _FRAME_BYTES
            yield record


def _scalar(value: Any) -> float | None:
    kind = value.WhichOneof("value")
    if kind == "simple_value":
        return value.simple_value
    if kind != "tensor" or any(size.size != 1 for size in value.tensor.tensor_shape.dim):
        return None
    from tensorboard.util.tensor_util import make_ndarray

    array = make_ndarray(value.tensor)
    return float(array.reshape(())) if array.size == 1 and array.dtype.kind in "fiu" else None
