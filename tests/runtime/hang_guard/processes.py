"""Starts `hanging_run`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def started(*arguments: object) -> subprocess.Popen[str]:
    """The program, with what it prints; its runs end by themselves after 300 s at the latest."""
    return subprocess.Popen(
        [sys.executable, "-m", "tests.runtime.hang_guard.hanging_run", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
