"""Runs a module as the two ranks of one program."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    """A port of this machine that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_two_ranks(module: str, *args: Path | str, seconds: float) -> list[tuple[str, str]]:
    """`python -m MODULE RANK ARGS...` for ranks 0 and 1; what each has written to stdout, stderr.

    Raises:
        subprocess.TimeoutExpired: one has not ended in time. Both are killed then.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    running = [
        subprocess.Popen(
            [sys.executable, "-m", module, rank, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in ("0", "1")
    ]
    try:
        return [process.communicate(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
