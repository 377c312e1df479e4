"""What interrupts a program, and the trace of what the program has trained.

Each program of this folder is `train(run)`, and a command too:

    python -m tests.pins.programs.loader FOLDER [KIND:STEP:PLACE ...]

It trains in FOLDER, is interrupted there, and writes `trace.jsonl` (a line for each step) and, if
it comes to its end, `end.json`.
"""

import hashlib
import itertools
import json
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from healcore import Checkpoints, Logging
from healcore import policy as policies

POLICY = policies.load("default", rollback={"probation": 4})
"""The default policy, in which a checkpoint is known-good after 4 healthy steps."""
RUN = {"checkpoints": Checkpoints(every=5), "logging": Logging(console=False)}
"""Options of each Healer."""

Kind = Literal["kill", "disk", "sigterm", "ctrl-c", "exit", "exception", "oom", "break", "damage"]
"""`disk` is a kill at a call that changes the disk. Such calls are counted instead of steps."""
Place = Literal["before", "after"]
"""Whether it comes before or after the optimizer's step, in the body of the loop."""


class Power(Exception):
    """The exception that interrupts a program."""


class Interruption(NamedTuple):
    """How a program is interrupted, and at which step (from 0)."""

    kind: Kind
    step: int
    place: Place = "after"

    def __str__(self) -> str:
        return f"{self.kind}:{self.step}:{self.place}"

    @staticmethod
    def parse(text: str) -> "Interruption":
        kind, step, place = text.split(":")
        return Interruption(kind, int(step), place)  # pyright: ignore[reportArgumentType]


class Run:
    """One start of a program.

    Args:
        folder: the folder of all starts of the run.
        *interruptions: what interrupts this start. All but the last one are damage.
    """

    def __init__(self, folder: Path, *interruptions: Interruption) -> None:
        self.folder = folder
        self.store = folder / "store"
        self.left: dict[tuple[Place, int], Kind]
        self.left = {(each.place, each.step): each.kind for each in interruptions}
        folder.mkdir(parents=True, exist_ok=True)
        for each in interruptions:
            if each.kind == "disk":
                kill_at_disk_call(each.step)
        random.seed(0)
        np.random.seed(0)  # noqa: NPY002 - the global generator is meant

    def interrupt(self, place: Place, step: int) -> Kind | None:
        """Interrupts this start, if an interruption is due at this step and place.

        Returns:
            "break" or "damage" if the program has to do it by itself, otherwise None.
        """
        kind = self.left.pop((place, step), None)
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "sigterm":
            os.kill(os.getpid(), signal.SIGTERM)
        elif kind == "ctrl-c":
            os.kill(os.getpid(), signal.SIGINT)
        elif kind == "exit":
            sys.exit(3)
        elif kind == "exception":
            raise Power
        elif kind == "oom":
            raise out_of_memory()
        return kind

    def trained(self, step: int, batches: Any, loss: float) -> None:
        """Writes down that a step has been taken."""
        line = {"step": step, "batches": batches, "loss": float(loss).hex()}
        with (self.folder / "trace.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")

    def ended(self, steps: int, arrays: Mapping[str, Any]) -> None:
        """Writes down how the run has ended: its steps, its arrays, its next random numbers."""
        digests = {name: digest(array) for name, array in arrays.items()}
        drawn = [random.random(), float(np.random.random())]  # noqa: NPY002
        end = {"steps": steps, "arrays": digests, "drawn": drawn}
        (self.folder / "end.json").write_text(json.dumps(end))


def kill_at_disk_call(number: int) -> None:
    """Kills this process at a call that changes the disk, before or in a save."""
    calls = itertools.count()

    def counted(call: Callable[..., Any]) -> Callable[..., Any]:
        def changed(*args: Any, **options: Any) -> Any:
            if next(calls) == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return changed

    for name in ("fsync", "rename", "replace", "unlink", "mkdir", "rmdir"):
        setattr(os, name, counted(getattr(os, name)))


def digest(array: Any) -> str:
    return hashlib.sha256(np.asarray(array).tobytes()).hexdigest()[:16]


def out_of_memory() -> BaseException:
    """The exception of the framework that the program has imported."""
    torch = sys.modules.get("torch")
    if torch is None:
        return RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1000 bytes.")
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1000 bytes")


def main(train: Callable[[Run], None]) -> None:
    folder, *interruptions = sys.argv[1:]
    train(Run(Path(folder), *map(Interruption.parse, interruptions)))
