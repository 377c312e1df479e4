"""Reads TensorBoard event files with the protocol buffers of the extra `tensorboard`."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from typing import Any

from healcore import extras, regular_file
from healcore.tools.traces.columns import Problem, TraceError


def scalars(path: str, problems: list[Problem]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yields every scalar as a separate record: {"step": step, tag: value}.

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
        for end, record in _records(data):
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


def _records(data: mmap.mmap) -> Iterator[tuple[int, bytes]]:
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
