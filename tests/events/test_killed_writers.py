"""Fault 39: a writer killed in the middle of a line, and several writers of one file."""

from __future__ import annotations

import random
import time

from healcore.events import Log, read
from tests.events.processes import first_line, output, writer

ROUNDS, ROUNDS_AT_MOST = 25, 100
ENOUGH = 5
"""Kills that hit a write."""
LARGE = 3 << 20
"""Characters of an event: the kernel looks for a kill between two pages of a long write."""


def test_sigkill_at_random_moments(in_memory):
    chance = random.Random(0)
    path, torn, whole = in_memory / "run.events.jsonl", 0, 0
    for number in range(ROUNDS_AT_MOST):
        if number >= ROUNDS and torn >= ENOUGH:
            break
        process = writer(path, size=LARGE)
        run = first_line(process)
        if number % 2:
            time.sleep(chance.uniform(0.0, 0.03))
        else:  # in the middle of a write, if this process gets its share: the file is growing
            size = path.stat().st_size
            while path.stat().st_size == size:
                pass
        process.kill()
        process.communicate()
        before = path.read_bytes()
        history = read(path)
        # All that is wrong is one line, the last, and every line before it is there.
        assert len(history.problems) == (not before.endswith(b"\n"))
        torn += len(history.problems)
        written = history.runs()[run]
        whole += len(written)
        assert [e["seq"] for e in written] == list(range(len(written)))

        log = Log(path)
        added = log.write("problem", step=None, problem="the one before was killed")
        after = read(path)
        assert after.events == [*history.events, added]
        assert [problem.line for problem in after.problems] == [
            problem.line for problem in history.problems
        ]
        path.unlink()
    assert torn >= ENOUGH, "hardly a kill hit a write: make the lines longer"
    assert whole > ROUNDS


def test_writers_at_once_lose_nothing(tmp_path):
    path, count = tmp_path / "run.events.jsonl", 1500
    processes = [writer(path, count=count, size=size) for size in (50, 500, 9000)]
    runs = {}
    for process in processes:
        run, lost = output(process).split()
        assert lost == "0"
        runs[run] = count + 2
    history = read(path)
    assert {run: len(events) for run, events in history.runs().items()} == runs
    for events in history.runs().values():
        numbers = [event["seq"] for event in events]
        assert numbers == list(range(numbers[0], numbers[0] + count + 2))
        assert [e["index"] for e in events[1:-1]] == list(range(count))
    assert history.problems == []
