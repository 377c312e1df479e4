"""Starts programs in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def python(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
    """A Python that finds healcore and the tests; its standard output is a pipe."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return subprocess.Popen(
        [sys.executable, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
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


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
