"""Long files in little memory."""

from __future__ import annotations

import json
import tracemalloc

import pytest

from healcore.tools.traces.csv_file import MAX_LINE
from healcore.tools.traces.trace import CHUNK
from tests.tools.traces.opened_traces import load, open_one, problems_of, write


def csv(step):
    return f"{step},{step % 89 / 8},{'' if step % 9 else step % 7}\n"


def record(step):
    return (
        json.dumps({"type": "step", "step": step, "loss": step % 89 / 8, "note": "x" * 20}) + "\n"
    )


def table(count):
    return "step,loss,grad_norm\n" + "".join(map(csv, range(count)))


def records(count):
    return "".join(map(record, range(count)))


def document(count):
    return '{"log_history": [' + ",\n".join(map(record, range(count))) + "]}"


@pytest.mark.parametrize("written", [table, records, document])
def test_memory_does_not_grow_with_the_file(tmp_path, written):
    """A file of three chunks, and one three times as long."""
    peaks = []
    for name, count in (("short", 3 * CHUNK), ("long", 9 * CHUNK)):
        trace = open_one(write(tmp_path / name, written(count)))
        tracemalloc.start()
        try:
            last = max(rows.step[-1] for rows in trace.rows())
            peaks.append(tracemalloc.get_traced_memory()[1])
        finally:
            tracemalloc.stop()
        assert last == count - 1
    assert peaks[1] < 1.1 * peaks[0]
    assert peaks[1] < 8 << 20


def test_a_line_without_an_end_is_left_out(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("step,loss\n0,1\n1," + "9" * (MAX_LINE + 5) + "\n2,3\n")
    trace = open_one(path)
    assert load(trace).step.tolist() == [0, 2]
    assert problems_of(trace) == [(3, "the line is longer than 1 MB: skipped")]
