"""What the ranks of a program have written: a JSON pair for each case, its name and the outcome."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.torch.forked_ranks import run_ranks


class Worlds:
    """Runs `python -m MODULE RANK WORLD RENDEZVOUS CASES...` as `world` ranks, once for each world.

    Args:
        module: to run.
        folder: for the files by which ranks find each other.
        seconds: after which ranks are killed.
    """

    def __init__(self, module: str, folder: Path, *, seconds: float) -> None:
        self._module, self._folder, self._seconds = module, folder, seconds
        self._found: dict[tuple[int, tuple[str, ...]], list[tuple[str, str]]] = {}

    def of(self, world: int, cases: Iterable[str], name: str) -> list[Any]:
        """The outcome of the case `name` on each rank, of a world that runs `cases`."""
        key = (world, tuple(cases))
        if key not in self._found:
            met = self._folder / f"rendezvous{len(self._found)}"
            self._found[key] = run_ranks(
                self._module, str(world), met, *key[1], world=world, seconds=self._seconds
            )
        found = [dict(map(json.loads, out.splitlines())) for out, _ in self._found[key]]
        errors = "\n".join(each[-3000:] for _, each in self._found[key])
        assert all(name in each for each in found), errors
        return [each[name] for each in found]
