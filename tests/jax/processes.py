"""The processes of one `jax.distributed` program on this machine, for tests.

Each begins with `join`, and prints a JSON pair for each case: its name and what this process saw.
Many cases share one program, because starting it costs more than they do.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from tests.torch.forked_ranks import run_ranks


def begin(devices: int = 1) -> None:
    """Gives this process CPU devices. Most of the time goes into compiling, so with little care."""
    flags = f"--xla_backend_optimization_level=0 --xla_force_host_platform_device_count={devices}"
    os.environ["XLA_FLAGS"] = flags
    jax.config.update("jax_platforms", "cpu")


def join(process: int, world: int, port: str, **options: Any) -> None:
    """Makes this process, with one CPU device, one of the program's."""
    begin()
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    options = {"initialization_timeout": 120, **options}
    jax.distributed.initialize(
        f"localhost:{port}", num_processes=world, process_id=process, **options
    )
    # gloo makes its connections in the first collective and waits 30 s there, while on a busy
    # machine one process may still compile: so first of all, in something small.
    multihost_utils.sync_global_devices("start")


def report(case: str, outcome: Any) -> None:
    """Prints what this process saw in a case."""
    print(json.dumps([case, outcome]), flush=True)


def free_port() -> str:
    """A port for the coordination service."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return str(found.getsockname()[1])


class Program:
    """What each process of a program wrote, case by case.

    Runs `python -m MODULE PROCESS WORLD PORT ARGS...` as `world` processes.
    """

    def __init__(self, module: str, *args: Path | str, world: int, seconds: float) -> None:
        jaxlib = importlib.import_module("jaxlib._jax")
        if world > 1 and not hasattr(jaxlib, "make_gloo_tcp_collectives"):
            pytest.skip("this jaxlib has no collectives of several processes on CPUs (gloo)")
        found = run_ranks(module, str(world), free_port(), *args, world=world, seconds=seconds)
        self.errors = "\n".join(errors[-3000:] for _, errors in found)
        lines = [[line for line in out.splitlines() if line.startswith('["')] for out, _ in found]
        self._outcomes = [dict(map(json.loads, each)) for each in lines]

    def of(self, case: str) -> list[Any]:
        """The outcome in each process."""
        assert all(case in each for each in self._outcomes), self.errors
        return [each[case] for each in self._outcomes]
