"""Fault 40: events that cannot be written are counted and reported; training continues."""

from __future__ import annotations

from healcore.events import Log, read
from tests.runtime.store.disk_faults import read_only, small_disk


def test_full_disk(tmp_path):
    with small_disk(tmp_path / "disk", megabytes=1) as root:
        path = root / "run.events.jsonl"
        events = Log(path)
        filler = root / "filler"
        filler.write_bytes(b"x" * ((1 << 20) - 20_000))
        written = 0
        while events.write("alarm", step=written, why="y" * 500) and not events.lost:
            written += 1
        assert 5 < written < 50
        for step in range(9):
            events.write("alarm", step=step, why="y" * 500)
        assert events.lost == 10
        assert [problem.line for problem in read(path).problems] == [written + 1], "a torn line"
        filler.unlink()
        events.write("good", step=99)
        events.write("good", step=100)
        assert events.lost == 10
        *_, reporting, after = read(path).events
        assert (reporting["lost"], reporting["seq"]) == (10, written + 10)
        assert "lost" not in after
        assert len(read(path).events) == written + 2


def test_read_only_directory(tmp_path, caplog):
    root = tmp_path / "root"
    root.mkdir()
    with read_only(root):
        events = Log(root / "deeper" / "run.events.jsonl")
        for step in (0, 1):
            events.write("start", step=step)
        assert events.lost == 2
    assert [record.name for record in caplog.records] == ["healcore"], "the warning comes once"
    assert "training continues" in caplog.text
    assert events.write("save", step=1)
    (event,) = read(root / "deeper" / "run.events.jsonl").events
    assert event["lost"] == 2
