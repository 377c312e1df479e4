"""Fault 40: events that cannot be written are counted and reported; training continues."""

from __future__ import annotations

import logging
import os

import pytest

from healcore.events import Log, read
from tests.events.processes import output, program
from tests.runtime.store.disk_faults import read_only, small_disk


def test_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        path = root / "run.events.jsonl"
        events = Log(path)
        filler = root / "filler"
        filler.write_bytes(b"x" * ((1 << 20) - 20_000))
        written = 0
        while events.write("alarm", step=written, why="y" * 500):
            written += 1
        assert 5 < written < 50
        assert events.error is not None
        for step in range(9):
            assert not events.write("alarm", step=step, why="y" * 500)
        assert events.lost == 10
        assert [problem.line for problem in read(path).problems] == [written + 1], "a torn line"
        filler.unlink()
        assert events.write("good", step=99)
        assert events.write("good", step=100)
        assert (events.lost, events.error) == (10, None)
        *_, reporting, after = read(path).events
        assert (reporting["lost"], reporting["seq"]) == (10, written + 10)
        assert "lost" not in after
        assert len(read(path).events) == written + 2


def test_limit_on_file_sizes(tmp_path):
    """Needs no rights. The signal that comes with it does not end the process either."""
    path = tmp_path / "run.events.jsonl"
    child = program("limited", path, 5000)
    written, lost, last = output(child).split()
    assert int(written) + int(lost) == 100
    assert last == "True"
    history = read(path)
    assert len(history.events) == int(written) + 1
    assert history.events[-1]["lost"] == int(lost)
    assert len(history.problems) == 1


def test_read_only_directory(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        events = Log(root / "deeper" / "run.events.jsonl")
        assert not events.write("start", step=0)
        assert events.lost == 1
    assert events.write("save", step=1)
    (event,) = read(root / "deeper" / "run.events.jsonl").events
    assert event["lost"] == 1


def test_a_disk_that_turns_read_only(tmp_path):
    root = tmp_path / "root"
    root.mkdir()
    events = Log(root / "run.events.jsonl")
    events.write("save", step=1)
    events.close()
    with read_only(root):
        assert not events.write("save", step=2)
    assert events.write("save", step=3)
    assert [e["step"] for e in read(root / "run.events.jsonl").events] == [1, 3]


@pytest.mark.parametrize("make", [os.mkdir, os.mkfifo], ids=["a directory", "an unread pipe"])
def test_a_path_that_is_no_file(tmp_path, make):
    make(tmp_path / "run.events.jsonl")
    events = Log(tmp_path / "run.events.jsonl")
    assert not events.write("start", step=0)
    assert events.lost == 1
    events.close()


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "file").touch()
    events = Log(tmp_path / "file" / "run.events.jsonl")
    assert not events.write("start", step=0)
    assert "NotADirectoryError" in str(events.error) or "FileExistsError" in str(events.error)


def test_the_device_that_is_always_full():
    """/dev/full: every write fails with ENOSPC."""
    events = Log("/dev/full")
    assert not events.write("start", step=0)
    assert "No space left" in str(events.error)


def test_a_pipe_that_is_read(tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        events = Log(path)
        assert events.write("start", step=0)
        assert os.read(reader, 1 << 16).endswith(b"}\n")
        while events.write("alarm", step=1, why="z" * 900):  # nobody empties it: full, not stuck
            pass
        assert events.lost == 1
    finally:
        os.close(reader)


def test_the_warning_comes_once(tmp_path, caplog):
    (tmp_path / "run.events.jsonl").mkdir()
    events = Log(tmp_path / "run.events.jsonl")
    with caplog.at_level(logging.WARNING, "healcore"):
        for step in range(3):
            events.write("save", step=step)
    assert [record.name for record in caplog.records] == ["healcore"]
    assert "training continues" in caplog.text
