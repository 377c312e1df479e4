"""Functions that start programs which use stores."""

from __future__ import annotations

import os
import subprocess
from typing import Any

from tests.forked_programs import ROOT, ForkedProgram


def start(
    module: str, *arguments: object, new_session: bool = False, **environment: str
) -> subprocess.Popen[str]:
    """Starts `python -m module`, with pipes to and from it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    new: Any = {"env": env, "start_new_session": new_session}
    return ForkedProgram("-m", module, *arguments, **new, **pipes)


def run(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    process = start(module, *arguments)
    try:
        out, err = process.communicate(timeout=600)
    except BaseException:
        process.kill()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(*processes: subprocess.Popen[str]) -> None:
    """Waits for programs that print "fine" at their end."""
    ends = [process.communicate(timeout=600) for process in processes]
    for process, (out, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err[-4000:]
        assert out.splitlines()[-1] == "fine"
