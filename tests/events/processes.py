"""Starts programs in processes of their own, and is such a program.

    python -m tests.events.processes write PATH COUNT SIZE
    python -m tests.events.processes limited PATH BYTES
    python -m tests.events.processes gone PID

`write` writes COUNT events of about SIZE characters, or events until it is killed if COUNT is 0.
`limited` writes 100 events under a limit on file sizes, then an event without the limit. `gone`
prints whether a process is gone, as a user sees it who may not signal it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

from healcore.events import Log
from healcore.events.process import current_process

ROOT = Path(__file__).parents[2]


def python(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """A Python that finds healcore and the tests; its standard output is a pipe."""
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def program(name: str, *arguments: Any) -> subprocess.Popen[str]:
    """One of the programs of this file."""
    return python("-m", "tests.events.processes", name, *arguments)


def writer(path: Path, *, count: int = 0, size: int = 100) -> subprocess.Popen[str]:
    """The program `write`; its first line of output is its run id."""
    return program("write", path, count, size)


def output(process: subprocess.Popen[str]) -> str:
    """The whole output. Checks that the exit status is 0."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return printed


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def write(path: str, count: str, size: str) -> None:
    log = Log(path)
    log.write("start", step=0, policy="default", mode="heal")
    print(log.run, flush=True)
    padding = ["x" * 9000] * (int(size) // 9000) + ["x" * (int(size) % 9000)]
    step = 0
    while step < int(count) or not int(count):
        log.write("alarm", step=step, index=step, padding=padding)
        step += 1
    log.write("end", step=step, ending="completed")
    print(log.lost, flush=True)


def limited(path: str, limit: str) -> None:
    log = Log(path)
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), hard))
    written = [log.write("alarm", step=step) for step in range(100)].count(True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    print(written, log.lost, log.write("end", step=100, ending="completed"))


def gone(pid: str) -> None:
    process = current_process()._replace(pid=int(pid), born=None)
    os.setuid(65534)  # after the imports: nobody may not be allowed to read the checkout
    print(process.gone())


if __name__ == "__main__":
    {"write": write, "limited": limited, "gone": gone}[sys.argv[1]](*sys.argv[2:])
