"""Logs that are read by replay, probe loss and report: bombs, loops, damage."""

from __future__ import annotations

import gzip
import json
import os
import struct

import pytest

from tests.hostile.reader_process import Reader

ROWS = "step,loss\n" + "".join(f"{step},{1 / (step + 1)}\n" for step in range(50))


def refused(reader: Reader, *args: object, **bounds: float) -> str:
    """Checks for exit status 3; returns the messages."""
    result = reader.probe("loss", *args, **bounds)
    assert result.status == 3, result
    return result.messages()


LOGS = {
    "a header of one long cell": b"step,loss," + b"x" * 200_000 + b"\n1,2\n",
    "a million columns": b"step,loss" + b",x" * 400_000 + b"\n1,2\n",
    "a gz": gzip.compress(ROWS.encode()),
    "runs of one name": b",".join([b"step"] + [b"a - loss"] * 100_000) + b"\n1\n",
    "columns common to all runs": ",".join(
        [f"{at}epoch" for at in range(20_000)] + [f"{at} - loss" for at in range(20_000)]
    ).encode()
    + b"\n1\n",
    "nested JSON": b'{"step": 1, "loss": ' + b"[" * 500_000 + b"\n",
    "nested in a document": b'{"log_history": [' + b'{"a":' * 500_000,
    "a line without end": b'{"step": 1, "loss": "' + b"x" * 40_000_000,
    "a log history of spaces": b'{"log_history"' + b" " * 2_000_000,
    "quotes": b"step,loss\n" + b'"\n' * 500_000,
    "a number of 400,000 digits": b'{"step": 1, "loss": ' + b"9" * 400_000 + b"}\n",
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_that_is_none(reader, tmp_path, name):
    path = tmp_path / "log"
    path.write_bytes(LOGS[name])
    refused(reader, path)


def test_a_whole_number_of_400_digits(reader, tmp_path):
    path = tmp_path / "log.jsonl"
    lines = [json.dumps({"step": 10**400 if at == 7 else at, "loss": 10**400}) for at in range(50)]
    path.write_text("\n".join(lines))
    reader.probe("loss", path)
    assert reader.run("replay", path).status in (0, 1, 2)


def test_directories_that_hold_each_other(reader, tmp_path):
    for at in range(4):
        (tmp_path / f"d{at}").mkdir()
        for other in range(4):
            os.symlink(tmp_path, tmp_path / f"d{at}" / f"l{other}")
    refused(reader, tmp_path)


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
def test_a_record_of_tensorboard_without_end(reader, tmp_path, length):
    from tensorboard.compat.proto import event_pb2

    start = event_pb2.Event(file_version="brain.Event:2").SerializeToString()  # type: ignore[attr-defined]
    rows = b"".join(framed(event(at, simple_value=1 / (at + 1))) for at in range(50))
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(framed(start) + rows + framed(b"x", length))
    result = reader.probe("loss", path)
    assert result.status in (0, 1)
    assert "truncated or damaged" in reader.run("replay", path).text


def test_a_tensor_of_no_dtype(reader, tmp_path):
    from tensorboard.compat.proto import event_pb2, tensor_pb2

    start = event_pb2.Event(file_version="brain.Event:2").SerializeToString()  # type: ignore[attr-defined]
    wrong = [tensor_pb2.TensorProto(dtype=kind, tensor_content=b"abc") for kind in (0, 1, 7, 99)]  # type: ignore[attr-defined]
    rows = b"".join(framed(event(at, simple_value=1 / (at + 1))) for at in range(50))
    tensors = b"".join(framed(event(50 + at, tensor=each)) for at, each in enumerate(wrong))
    path = tmp_path / "events.out.tfevents.1"
    path.write_bytes(framed(start) + rows + tensors)
    assert reader.probe("loss", path).status in (0, 1)


def test_a_bad_log_costs_no_other_its_verdict(reader, tmp_path):
    bad, good = tmp_path / "bad.csv", tmp_path / "good.csv"
    bad.write_bytes(LOGS["a header of one long cell"])
    good.write_text(ROWS)
    assert sorted(reader.probe("loss", bad, good).verdicts()) == ["ERROR", "PASS"]


@pytest.mark.parametrize(
    "text",
    [
        *("[" * 300_000, '[{"file":"a","points":1e999}]', "9" * 400_000),
        f'[{{"file":"log.csv","points":500,"spikes":[{{"onset":{10**400},"end":{10**400}}}]}}]',
        '[{"file":"log.csv","points":500,"ambiguous":[{"onset":0,"end":{}}]}]',
    ],
)
def test_labels_that_are_none(reader, tmp_path, text):
    labels, log = tmp_path / "labels.json", tmp_path / "log.csv"
    labels.write_text(text)
    log.write_text(ROWS)
    result = reader.run("sweep", log, "--vary", "max_skips=5", "--labels", labels)
    assert result.status == 2
    assert "list of labels" in result.text
