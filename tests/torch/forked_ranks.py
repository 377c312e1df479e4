"""Programs of several ranks; the cases of a program share one world, which costs more to start.

A rank is a fork, as `python -m MODULE RANK WORLD PORT FOLDER CASES...`. It prints a JSON pair for
each case: its name and the outcome.
"""

import contextlib
import faulthandler
import json
import logging
import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.forked_programs import ROOT, ForkedProgram

# It does not end as an interpreter does: a process group can wait there for other ranks.
_PROGRAM = """
import os, runpy, sys, traceback
del sys.argv[0]
try:
    runpy.run_module(sys.argv[0], run_name="__main__")
except BaseException:
    traceback.print_exc()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""


def free_port() -> int:
    """A port of this machine that no program uses."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def run_ranks(
    module: str, *args: Path | str, world: int = 2, seconds: float, **options: Any
) -> list[tuple[str, str]]:
    """What each rank, `python -m MODULE RANK ARGS...`, has written to stdout and stderr."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    with contextlib.ExitStack() as stack:
        running, files = [], []
        for rank in range(world):
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            files.append((out, err))
            command = ("-c", _PROGRAM, module, rank, *args)
            program = ForkedProgram(*command, env=env, stdout=out, stderr=err, **options)
            stack.callback(program.kill)
            running.append(program)
        for program in running:
            program.wait(seconds)
        for pair in files:
            for each in pair:
                each.seek(0)
        return [(out.read(), err.read()) for out, err in files]


Outcomes = list[tuple[dict[str, Any], str]]
"""Of each rank: name of a case -> its outcome, and standard error."""


def outcomes_of(written: list[tuple[str, str]]) -> Outcomes:
    """The JSON pairs among the lines of each rank."""
    return [
        (dict(json.loads(line) for line in out.splitlines() if line[:2] == '["'), error)
        for out, error in written
    ]


def outcome_of_each(found: Outcomes, name: str) -> list[Any]:
    assert all(name in each for each, _ in found), "\n".join(e[-3000:] for _, e in found)
    return [each[name] for each, _ in found]


class Worlds:
    """The outcomes of a module's cases. The cases of one call run in one world, once."""

    def __init__(self, module: str, folder: Path, **options: Any) -> None:
        self._module, self._folder, self._options = module, folder, options
        self._found: dict[tuple[int, tuple[str, ...]], Outcomes] = {}

    def of(self, world: int, cases: Iterable[str], name: str) -> list[Any]:
        """The outcome of the case `name` on each rank, of a world that runs `cases`."""
        key = (world, tuple(cases))
        if key not in self._found:
            folder = self._folder / str(len(self._found))
            folder.mkdir()
            arguments = (str(world), str(free_port()), folder, *key[1])
            written = run_ranks(self._module, *arguments, world=world, **self._options)
            self._found[key] = outcomes_of(written)
        return outcome_of_each(self._found[key], name)


def worlds_of(module: str, seconds: float, **options: Any) -> Any:
    """A fixture of the worlds of a module."""

    @pytest.fixture(scope="module")
    def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
        return Worlds(module, tmp_path_factory.mktemp("worlds"), seconds=seconds + 30, **options)

    return worlds


def serve(run: Callable[[str], Any], *, seconds: float, cases: Iterable[str] = ()) -> None:
    """The main function of a rank; `run` takes the name of a case and returns the outcome.

    After some seconds ranks that wait for each other show where, and end.
    """
    rank, world, port, folder, *named = sys.argv[1:]
    faulthandler.dump_traceback_later(seconds, exit=True)
    logging.root.handlers.clear()  # of absl, which the server has imported for JAX
    if world != "1":
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        met = f"file://{folder}/rendezvous"
        dist.init_process_group("gloo", init_method=met, rank=int(rank), world_size=int(world))
    for case in named or cases:
        print(json.dumps([case, run(case)]), flush=True)


def folder() -> Path:
    """A folder that the ranks of this program share."""
    return Path(sys.argv[4])
