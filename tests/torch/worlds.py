"""Programs of several ranks, whose cases share one world: starting it costs more than they do.

    python -m MODULE RANK WORLD RENDEZVOUS CASES...

Each rank prints a JSON pair for each case: its name and the outcome.
"""

from __future__ import annotations

import faulthandler
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from tests.torch.forked_ranks import run_ranks


class Worlds:
    """The outcomes of a module's cases, by world. Each world runs once.

    Args:
        module: the program.
        folder: of the files by which ranks find each other.
        seconds: after which a program is killed.
    """

    def __init__(self, module: str, folder: Path, *, seconds: float) -> None:
        self._module, self._folder, self._seconds = module, folder, seconds
        self._found: dict[tuple[int, tuple[str, ...]], list[tuple[dict[str, Any], str]]] = {}

    def outcomes(self, world: int, cases: Iterable[str]) -> list[tuple[dict[str, Any], str]]:
        """The outcomes by case, and what was written to stderr, of each rank."""
        key = (world, tuple(cases))
        if key not in self._found:
            met = self._folder / str(len(self._found)) / "rendezvous"
            met.parent.mkdir()
            found = run_ranks(
                self._module, str(world), met, *key[1], world=world, seconds=self._seconds
            )
            self._found[key] = [(dict(map(json.loads, o.splitlines())), e) for o, e in found]
        return self._found[key]

    def of(self, world: int, cases: Iterable[str], name: str) -> list[Any]:
        """The outcome of the case `name` on each rank, of a world that runs `cases`."""
        found = self.outcomes(world, cases)
        assert all(name in each for each, _ in found), "\n".join(e[-3000:] for _, e in found)
        return [each[name] for each, _ in found]


def worlds_of(module: str, seconds: float) -> Any:
    """A fixture of the worlds of a module."""

    @pytest.fixture(scope="module")
    def worlds(tmp_path_factory: pytest.TempPathFactory) -> Worlds:
        return Worlds(module, tmp_path_factory.mktemp("worlds"), seconds=seconds + 30)

    return worlds


def serve(
    run: Callable[[str], Any], *, seconds: float, cases: Iterable[str] = (), ends: bool = True
) -> None:
    """The main function of a rank.

    Args:
        run: takes the name of a case and returns the outcome.
        seconds: after which ranks that wait for each other show where, and end.
        cases: to run where the command line names none.
        ends: whether to leave the group at the end, which takes all ranks.
    """
    rank, world, met, *named = sys.argv[1:]
    faulthandler.dump_traceback_later(seconds, exit=True)
    if world != "1":
        dist.init_process_group(
            "gloo", init_method=f"file://{met}", rank=int(rank), world_size=int(world)
        )
    for case in named or cases:
        print(json.dumps([case, run(case)]), flush=True)
    if ends and world != "1":
        dist.destroy_process_group()


def folder() -> Path:
    """A folder that the ranks of this program share."""
    return Path(sys.argv[3]).parent
