"""Starting writers and other programs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

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


def writer(path: Path, *, count: int = 0, size: int = 100) -> subprocess.Popen[str]:
    """A `tests.events.writer`; its first line of output is its run id."""
    return python("-m", "tests.events.writer", path, count, size)


def output(process: subprocess.Popen[str]) -> str:
    """Its whole output; checks that its exit status is 0."""
    printed, _ = process.communicate(timeout=600)
    assert process.returncode == 0
    return printed


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()
