"""Runs a module as several ranks. One process imports it, which takes the longest, and forks.

    python -m tests.torch.forked_ranks MODULE WORLD FOLDER ARGS...

Each rank is `python -m MODULE RANK ARGS...`; FOLDER/RANK.out and FOLDER/RANK.err is what it writes.
"""

from __future__ import annotations

import importlib
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

from tests.torch.two_ranks import ROOT


def run_ranks(
    module: str, *args: Path | str, world: int = 2, seconds: float
) -> list[tuple[str, str]]:
    """What each rank has written to stdout and stderr.

    Raises:
        subprocess.TimeoutExpired: one has not ended in time. All are killed then.
    """
    path = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory() as folder:
        parent = subprocess.Popen(
            [sys.executable, "-m", __name__, module, str(world), folder, *map(str, args)],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        try:
            parent.wait(seconds)
        finally:
            if parent.poll() is None:
                os.killpg(parent.pid, signal.SIGKILL)
                parent.wait()
        files = [Path(folder) / str(rank) for rank in range(world)]
        return [
            (each.with_suffix(".out").read_text(), each.with_suffix(".err").read_text())
            for each in files
        ]


def main(module: str, world: int, folder: Path, args: list[str]) -> None:
    importlib.import_module(module)
    ranks = []
    for rank in range(world):
        process = os.fork()
        if process:
            ranks.append(process)
            continue
        for descriptor, kind in ((1, "out"), (2, "err")):
            os.dup2(os.open(folder / f"{rank}.{kind}", os.O_CREAT | os.O_WRONLY), descriptor)
        sys.argv = [module, str(rank), *args]
        sys.modules.pop(module)
        try:
            runpy.run_module(module, run_name="__main__")
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)
    for process in ranks:
        os.waitpid(process, 0)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4:])
