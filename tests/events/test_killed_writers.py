"""Fault 39: a writer killed in the middle of a line, and several writers of one file."""

import itertools
import random
import subprocess
import sys
import time
from pathlib import Path

from healcore.events import Log, read
from tests.forked_programs import ForkedProgram

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
        run = process.stdout.readline().strip()  # type: ignore[union-attr]
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

        added = Log(path).write("problem", step=None, problem="the one before was killed")
        after = read(path)
        assert after.events == [*history.events, added]
        assert [each.line for each in after.problems] == [each.line for each in history.problems]
        path.unlink()
    assert torn >= ENOUGH, "hardly a kill hit a write: make the lines longer"
    assert whole > ROUNDS


def test_writers_at_once_lose_nothing(tmp_path):
    path, count = tmp_path / "run.events.jsonl", 1500
    processes = [writer(path, count=count, size=size) for size in (50, 500, 9000)]
    runs = {}
    for process in processes:
        printed, _ = process.communicate(timeout=600)
        run, lost = printed.split()
        assert (process.returncode, lost) == (0, "0")
        runs[run] = count + 2
    history = read(path)
    assert {run: len(events) for run, events in history.runs().items()} == runs
    for events in history.runs().values():
        numbers = [event["seq"] for event in events]
        assert numbers == list(range(numbers[0], numbers[0] + count + 2))
        assert [e["index"] for e in events[1:-1]] == list(range(count))
    assert history.problems == []


def writer(path: Path, *, count: int = 0, size: int = 100) -> subprocess.Popen[str]:
    """The program of this file. With `count` 0 it writes events until it is killed."""
    command = "-m", "tests.events.test_killed_writers", path, count, size
    return ForkedProgram(*command, imports=("healcore.events",), stdout=subprocess.PIPE)


def write(path: str, count: str, size: str) -> None:
    log = Log(path)
    log.write("start", step=0, policy="default", mode="heal")
    print(log.run, flush=True)
    padding = ["x" * 9000] * (int(size) // 9000) + ["x" * (int(size) % 9000)]
    for step in range(int(count)) if int(count) else itertools.count():
        log.write("alarm", step=step, index=step, padding=padding)
    log.write("end", step=int(count), ending="completed")
    print(log.lost, flush=True)


if __name__ == "__main__":
    write(*sys.argv[1:])
