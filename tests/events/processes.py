"""Starts programs in processes of their own, and is such a program.

    python -m tests.events.processes PATH COUNT SIZE

Writes COUNT events of about SIZE characters, or events until it is killed if COUNT is 0.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from healcore.events import Log

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


def run(*arguments: Any, seconds: float) -> subprocess.CompletedProcess[str]:
    """Runs a Python to its end, which is no more than `seconds` away."""
    process = python(*arguments, stderr=subprocess.PIPE)
    try:
        out, err = process.communicate(timeout=seconds)
    finally:
        process.kill()
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def writer(path: Path, *, count: int = 0, size: int = 100) -> subprocess.Popen[str]:
    """The program of this file; its first line of output is its run id."""
    return python("-m", "tests.events.processes", path, count, size)


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


if __name__ == "__main__":
    write(*sys.argv[1:])
