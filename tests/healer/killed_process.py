"""One process of a healed run that will be killed, and its reports to the killing process.

Imported by repeated_kills.py, which forks; nothing here runs before that.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import mmap
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.loop.saver import Saver
from healcore.runtime.loop.termination import AlreadyCompleted
from healcore.runtime.store import CheckpointStore
from tests.healer.training_loops import Faults, loop_of, rules, train

DATA = 45


class Variant(NamedTuple):
    """The kind of run."""

    bad: tuple[int, ...]
    """Batches that are NaN each time."""
    forward: bool = False
    """Data that cannot be put back."""


VARIANTS = {"rewound": Variant((13, 14, 31)), "forward": Variant((13, 33), forward=True)}

SAVE, WRITE, BACK = "save", "write", "rollback"
PHASES: tuple[str, ...] = (SAVE, WRITE, BACK)
"""The copy of the state, writing it behind the loop, and all of a rollback, to its last event."""
READY, USABLE, GOOD, STEPPED = b"r", b"u", b"g", b"s"
BEGUN: dict[str, bytes] = {SAVE: b"S", WRITE: b"W", BACK: b"B"}
CALLS = ("fsync", "rename", "replace", "write", "unlink", "mkdir", "rmdir")
"""Functions of `os` that change the disk; the framework's own writing of arrays is not in it."""


class Aim(NamedTuple):
    """When this process is to be killed."""

    phase: str = ""
    """The phase in which it is killed; "" for any time."""
    calls: bool = False
    """Before or after one of CALLS, by the process itself; else from outside, after some time."""
    part: float = 0.0
    """How far into the phase, from 0 to 1; without a phase how far into the run."""
    stepped: bool = False
    """Only after this process has finished a step: the start is over then."""


def watch_phases(begin: Callable[[str], None], end: Callable[[str], None]) -> None:
    """Calls `begin` and `end` around each of PHASES in this process."""

    def watch(owner: Any, name: str, phase: str) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            begin(phase)
            result = function(*args, **kwargs)
            end(phase)
            return result

        setattr(owner, name, watched)

    watch(Saver, "write", SAVE)
    watch(CheckpointStore, "_commit", WRITE)
    watch(Recovery, "roll_back", BACK)


class Watched:
    """Reports to the killer which phases are in progress; dies by itself if that is the aim.

    Args:
        shared: a byte for each phase, which outlives the process.
        pipe: a byte for everything that begins.
        die_at: phase, and how many of CALLS after its beginning; None: not by itself.
        stepped: whether a phase counts only after a step of this process.
    """

    def __init__(
        self, shared: mmap.mmap, pipe: int, die_at: tuple[str, int] | None, *, stepped: bool
    ) -> None:
        self._shared, self._pipe, self._die_at = shared, pipe, die_at
        self._may_die = not stepped
        self._write = os.write
        self._calls: dict[str, int] = dict.fromkeys(PHASES, 0)
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)
        """The longest of each phase."""
        self.calls: dict[str, int] = dict.fromkeys(PHASES, 0)
        """The most calls of each phase."""
        self._began: dict[str, float] = {}
        watch_phases(self._begin, self._end)
        for name in CALLS:
            self._count(name)

    def send(self, what: bytes) -> None:
        """Sends a report to the killing process."""
        self._write(self._pipe, what)

    def step_finished(self) -> None:
        """Reports a step of this process."""
        self._may_die = True
        self.send(STEPPED)

    def _begin(self, phase: str) -> None:
        self._calls[phase], self._began[phase] = 0, time.monotonic()
        self._shared[PHASES.index(phase)] = 1
        self.send(BEGUN[phase])

    def _end(self, phase: str) -> None:
        self._shared[PHASES.index(phase)] = 0
        seconds = time.monotonic() - self._began[phase]
        self.seconds[phase] = max(self.seconds[phase], seconds)
        self.calls[phase] = max(self.calls[phase], self._calls[phase])

    def _count(self, name: str) -> None:
        function = getattr(os, name)

        @functools.wraps(function)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._pass()
            result = function(*args, **kwargs)
            self._pass()
            return result

        setattr(os, name, counted)

    def _pass(self) -> None:
        for place, phase in enumerate(PHASES):
            if self._shared[place]:
                if self._may_die and self._die_at == (phase, self._calls[phase]):
                    os.kill(os.getpid(), signal.SIGKILL)
                self._calls[phase] += 1


def run_process(
    framework: str, variant: Variant, folder: Path, trace: Path, watched: Watched
) -> None:
    """Checks what is on disk, then trains to the end, writing each step's state to `trace`."""
    logging.getLogger("healcore").addHandler(logging.NullHandler())
    logging.getLogger("healcore").setLevel(logging.INFO)
    logging.getLogger("healcore").propagate = False
    watched.send(_there(framework, folder))
    policy = rules(recoveries=6)
    run: Callable[..., dict[str, Any]] = functools.partial(_run, framework, variant, policy, folder)
    with trace.open("a", buffering=1) as file:
        try:
            facts = run(file, watched)
        except AlreadyCompleted:  # it was killed just before it logged its end
            facts = run(file, watched, resume=True)
    (trace.parent / "end.json").write_text(json.dumps(facts))


def _run(
    framework: str,
    variant: Variant,
    policy: Any,
    folder: Path,
    file: Any,
    watched: Watched,
    **options: Any,
) -> dict[str, Any]:
    loop = loop_of(framework, Faults(always=variant.bad), policy)
    first = True

    def note(healer: Any, number: int) -> None:
        nonlocal first
        if first:
            first = False
            watched.send(READY)
        else:
            watched.step_finished()
        loop.state = healer.state
        engines = healer._loop.driver.engines()
        logged = [healer.rollbacks, healer.step, number, _digest(loop.weights()), _digest(engines)]
        file.write(json.dumps(logged) + "\n")

    data = iter(range(DATA)) if variant.forward else range(DATA)
    facts = train(loop, policy, data, store=folder, before=note, **options)
    return {
        **facts,
        "weights": _digest(loop.weights()),
        "seconds": watched.seconds,
        "calls": watched.calls,
    }


def _there(framework: str, folder: Path) -> bytes:
    """Whether there are a state to resume from and a known-good one; checks that all are intact."""
    if framework == "torch":
        from healcore.torch.store import DCPStore as Store
    else:
        from healcore.jax.store import OrbaxStore as Store
    store = Store(folder)
    saves = [each for each in store.steps() if each.status != "abandoned" and each.finite]
    for each in saves:
        store.verify(each.step)
    assert store.damaged() == [], store.damaged()
    good = any(each.status == "good" for each in saves)
    return USABLE * bool(saves) + GOOD * good


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    if isinstance(value, list):
        for array in value:
            digest.update(array.tobytes())
    else:
        digest.update(json.dumps(value, sort_keys=True).encode())
    return digest.hexdigest()[:16]
