"""Files that are no log, or an empty one: one sentence names the reason."""

from __future__ import annotations

import os

import pytest

from healcore.tools.traces import open_traces
from tests.tools.traces.opened_traces import open_one, refusal, write


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "it is empty"),
        ("step,loss\n", "no usable row"),
        ("step,loss\n1,\n2,\n", "no usable row"),
        ("step,accuracy\n1,2\n", "only 'step', 'accuracy'. Name one: --column loss="),
        ("1,2.5\n2,2.25\n", "its first line is data, not a header: '1,2.5'. Write the names"),
        ("step,loss\n1,x\n2,y\n", "column 'loss': 'x' is not a number"),
        ("a log in prose\nof two lines\n", "its first line is 'a log in prose'. It is not a CSV"),
        ("\0\1\2", "it is binary"),
        ('{"torn', "it is JSON, but has no 'log_history'"),
        ('{"step": 1, "loss": null}\n', "no usable row"),
        ("x" * (2 << 20), "this is not a table"),
    ],
)
def test_files_without_a_usable_row(tmp_path, text, message):
    assert message in refusal(write(tmp_path / "run.csv", text))


def test_paths_that_cannot_be_read_do_not_stop_the_others(tmp_path):
    good = write(tmp_path / "good.csv", "step,loss\n1,2\n")
    absent = str(tmp_path / "absent.csv")
    traces, unreadable = open_traces([absent, str(good)])
    assert [trace.name for trace in traces] == [str(good)]
    assert unreadable == [(absent, "it cannot be read: No such file or directory")]


def test_a_directory_of_several_kinds_reports_what_it_reads(tmp_path):
    write(tmp_path / "train-1.jsonl", '{"type":"step","step":1,"loss":2}\n')
    write(tmp_path / "train-2.jsonl", '{"type":"step","step":2,"lo\n')
    write(tmp_path / "train-3.jsonl", '{"type":"step","step":2,"loss":1}\n')
    write(tmp_path / "metrics.csv", "step,loss\n1,2\n")
    write(tmp_path / ".hidden.csv", "step,loss\n1,2\n")
    trace = open_one(tmp_path)
    assert (trace.rows.step.tolist(), trace.rows.values["loss"].tolist()) == ([1, 2], [2, 1])


def test_a_pipe_is_refused_with_a_message_and_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "log")
    assert "pipe or a device" in refusal(tmp_path / "log")
