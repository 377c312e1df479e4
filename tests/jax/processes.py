"""Runs a module as the processes of one `jax.distributed` program on this machine.

Each process is `python -m MODULE PROCESS WORLD PORT ARGS...`, begins with `join`, and prints a JSON
pair for each case: its name and what this process saw. Many cases share one program, because
starting it costs more than they do.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

ROOT = Path(__file__).parents[2]


def join(process: int, world: int, port: str) -> None:
    """Makes this process one of the program's, with one CPU device."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=world, process_id=process, initialization_timeout=120
    )
    # gloo makes its connections in the first collective and waits 30 s there, while on a busy
    # machine one process may still compile: so first of all, in something small.
    multihost_utils.sync_global_devices("start")


def report(case: str, outcome: Any) -> None:
    """Prints what this process saw in a case."""
    print(json.dumps([case, outcome]), flush=True)


def start(
    module: str, *args: object, world: int, folder: Path, **environment: str
) -> list[subprocess.Popen[bytes]]:
    """Starts the processes; FOLDER/PROCESS.out and FOLDER/PROCESS.err is what they write."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = str(found.getsockname()[1])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    # Most of the time goes into compiling.
    env["XLA_FLAGS"] = "--xla_backend_optimization_level=0"
    running = []
    for process in range(world):
        with (
            (folder / f"{process}.out").open("wb") as out,
            (folder / f"{process}.err").open("wb") as err,
        ):
            command = [sys.executable, "-m", module, str(process), str(world), port]
            running.append(
                subprocess.Popen(
                    [*command, *map(str, args)],
                    cwd=ROOT,
                    env={**env, **environment},
                    stdout=out,
                    stderr=err,
                )
            )
    return running


class Program:
    """What each process of a program wrote, case by case."""

    def __init__(
        self, module: str, *args: object, world: int, seconds: float, **environment: str
    ) -> None:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            running = start(module, *args, world=world, folder=folder, **environment)
            try:
                for each in running:
                    each.wait(seconds)
            finally:
                for each in running:
                    each.kill()
            self.errors = "\n".join(
                (folder / f"{i}.err").read_text(errors="replace")[-3000:] for i in range(world)
            )
            outs = [(folder / f"{i}.out").read_text() for i in range(world)]
        if "gloo" in self.errors and "was not built" in self.errors:
            pytest.skip("this jaxlib has no gloo collectives for CPUs")
        lines = [[line for line in out.splitlines() if line.startswith('["')] for out in outs]
        self._outcomes = [dict(map(json.loads, each)) for each in lines]

    def of(self, case: str) -> list[Any]:
        """The outcome in each process."""
        assert all(case in each for each in self._outcomes), self.errors
        return [each[case] for each in self._outcomes]
