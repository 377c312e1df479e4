"""Starts `hanging_run` in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def started(how: str, folder: Path, *ranks: object) -> subprocess.Popen[str]:
    """The run, which ends by itself after 300 s at the latest; its output goes to a file."""
    module = "tests.runtime.hang_guard.hanging_run"
    name = f"{folder.name}.{'.'.join(map(str, ranks))}.log"
    with folder.with_name(name).open("w") as out:
        return subprocess.Popen(
            [sys.executable, "-m", module, how, str(folder), *map(str, ranks)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=out,
            stderr=subprocess.STDOUT,
            text=True,
        )
