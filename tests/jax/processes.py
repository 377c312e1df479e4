"""The processes of one `jax.distributed` program on this machine: scenarios are functions.

    python -m tests.jax.processes PROCESS WORLD PORT DEVICES ROOT SCENARIO...

A scenario is `module:function`, or `module:function:argument`, of a module of this folder. The
function takes the folder ROOT and the argument. Each process prints a JSON pair for each scenario:
its name and what this process saw. Many share one program, because starting it costs more.
"""

import faulthandler
import importlib
import json
import os
import sys
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental import multihost_utils

from tests.torch.forked_ranks import free_port, outcome_of_each, outcomes_of, run_ranks

SECONDS = 900
"""After which processes that wait for each other show where, and end."""


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
    # gloo connects in the first collective and waits 30 s, while another process may still compile.
    multihost_utils.sync_global_devices("start")


class Program:
    """What each process of a program wrote, scenario by scenario."""

    def __init__(self, root: Path | str, *scenarios: str, world: int, devices: int = 1) -> None:
        jaxlib = importlib.import_module("jaxlib._jax")
        if world > 1 and not hasattr(jaxlib, "make_gloo_tcp_collectives"):
            pytest.skip("this jaxlib has no collectives of several processes on CPUs (gloo)")
        arguments = (str(world), str(free_port()), str(devices), root, *scenarios)
        seconds = SECONDS + 60
        found = run_ranks("tests.jax.processes", *arguments, world=world, seconds=seconds)
        self._found = outcomes_of(found)

    def of(self, scenario: str) -> list[Any]:
        """The outcome in each process."""
        return outcome_of_each(self._found, scenario)


def main(process: int, world: int, port: str, devices: int, root: Path, names: list[str]) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    if world > 1:
        join(process, world, port)
    else:
        begin(devices)
    for name in names:
        module, function, *arguments = name.split(":")
        scenario = getattr(importlib.import_module(f"tests.jax.{module}"), function)
        print(json.dumps([name, scenario(root, *arguments)]), flush=True)
    if world > 1:
        multihost_utils.sync_global_devices("end")  # the first to end would end the others


if __name__ == "__main__":
    _, rank, ranks, service, each, folder, *scenarios = sys.argv
    main(int(rank), int(ranks), service, int(each), Path(folder), scenarios)
