"""Logs that are read by replay, probe loss and report: bombs, loops, damage."""

from __future__ import annotations

import gzip
import struct

import pytest

from tests.hostile import reader

ROWS = "step,loss\n" + "".join(f"{step},{1 / (step + 1)}\n" for step in range(50))


LOGS = {
    "a header of one long cell": b"step,loss," + b"x" * 200_000 + b"\n1,2\n",
    "a million columns": b"step,loss" + b",x" * 400_000 + b"\n1,2\n",
    "a gz": gzip.compress(ROWS.encode()),
    "nested JSON": b'{"step": 1, "loss": ' + b"[" * 500_000 + b"\n",
    "a line without end": b'{"step": 1, "loss": "' + b"x" * 40_000_000,
    "a number of 400,000 digits": b'{"step": 1, "loss": ' + b"9" * 400_000 + b"}\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_none(tmp_path, name):
    path = tmp_path / "log"
    path.write_bytes(LOGS[name])
    assert reader.probe("loss", path).status == 3


def framed(data: bytes, length: int | None = None) -> bytes:
    """A record of TensorBoard."""
    from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import masked_crc32c

    head = struct.pack("<Q", len(data) if length is None else length)
    crc = [struct.pack("<I", masked_crc32c(part)) for part in (head, data)]
    return head + crc[0] + data + crc[1]


def event(step: int, **value: object) -> bytes:
    """An event of TensorBoard."""
    from tensorboard.compat.proto import event_pb2, summary_pb2

    summary = summary_pb2.Summary(value=[summary_pb2.Summary.Value(tag="loss", **value)])  # type: ignore[attr-defined]
    return event_pb2.Event(step=step, summary=summary).SerializeToString()  # type: ignore[attr-defined]


@pytest.mark.parametrize("length", [1 << 63, 1 << 33])
def test_a_record_of_tensorboard_without_end(tmp_path, length):
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.Event(file_version="brain.Event:2").SerializeToString()  # type: ignore[attr-defined]
    rows = b"".join(framed(event(at, simple_value=1 / (at + 1))) for at in range(50))
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(framed(start) + rows + framed(b"x", length))
    result = reader.probe("loss", path)
    assert result.status in (0, 1)
    assert "truncated or damaged" in reader.run("replay", path).text
