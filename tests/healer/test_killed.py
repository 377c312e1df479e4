"""SIGKILL at random moments of saves and rollbacks: the run ends as if never killed.

This file is a program too: python -m tests.healer.test_killed FRAMEWORK ROOT KILLS [stepped]

With `stepped` every kill comes after the process has finished a step; else many land in its start.
It imports the framework once and forks a child for every start. Before the first run of a kind is
one that is never killed: what it did at every step is what the killed ones must do too. Prints one
JSON line with what was counted; ends with an error at the first thing that is not as it must be.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import logging
import mmap
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.loop.saver import Saver
from healcore.runtime.loop.termination import AlreadyCompleted
from healcore.runtime.store import CheckpointStore
from tests.events import processes
from tests.healer import killed_run_checks as checks
from tests.healer.training_loops import Faults, loop_of, rules, train

DATA = 45


class Variant(NamedTuple):
    """The kind of run."""

    bad: tuple[int, ...]  # batches that are NaN each time
    forward: bool = False  # data that cannot be put back


VARIANTS = {"rewound": Variant((13, 14, 31)), "forward": Variant((13, 33), forward=True)}

SAVE, WRITE, BACK = "save", "write", "rollback"
PHASES: tuple[str, ...] = (SAVE, WRITE, BACK)
"""The copy of the state, writing it behind the loop, and all of a rollback, to its last event."""
READY, USABLE, GOOD, STEPPED = b"r", b"u", b"g", b"s"
BEGUN: dict[str, bytes] = {SAVE: b"S", WRITE: b"W", BACK: b"B"}
CALLS = ("fsync", "rename", "replace", "write", "unlink", "mkdir", "rmdir")
"""Functions of `os` that change the disk; the framework's own writing of arrays is not in it."""


class Aim(NamedTuple):
    """When a process is to be killed."""

    phase: str = ""  # the phase in which it is killed; "" for any time
    calls: bool = False  # at one of CALLS, by the process itself; else from outside, after a time
    part: float = 0.0  # how far into the phase, from 0 to 1; without a phase how far into the run
    stepped: bool = False  # only after this process has finished a step: the start is over then


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
        self._may_die, self._write = not stepped, os.write
        self._calls, self._began = Counter[str](), dict[str, float]()
        self.seconds: dict[str, float] = dict.fromkeys(PHASES, 0.0)  # the longest of each phase
        self.calls: dict[str, int] = dict.fromkeys(PHASES, 0)  # the most calls of each phase
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
    logger = logging.getLogger("healcore")
    logger.addHandler(logging.NullHandler())
    logger.setLevel(logging.INFO)
    logger.propagate = False
    watched.send(_there(framework, folder))
    policy = rules(recoveries=6)

    def run(**options: Any) -> dict[str, Any]:
        loop, ready = loop_of(framework, Faults(always=variant.bad), policy), []

        def note(healer: Any, number: int) -> None:
            if ready:
                watched.step_finished()
            else:
                ready.append(number)
                watched.send(READY)
            loop.state = healer.state
            state = _digest(loop.weights()), _digest(healer._loop.driver.engines())
            file.write(json.dumps([healer.rollbacks, healer.step, number, *state]) + "\n")

        data = iter(range(DATA)) if variant.forward else range(DATA)
        facts = train(loop, policy, data, store=folder, before=note, **options)
        facts |= {"seconds": watched.seconds, "calls": watched.calls}
        return {**facts, "weights": _digest(loop.weights())}

    with trace.open("a", buffering=1) as file:
        try:
            facts = run()
        except AlreadyCompleted:  # it was killed just before it logged its end
            facts = run(resume=True)
    (trace.parent / "end.json").write_text(json.dumps(facts))


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


AIMS = (
    (BACK, True),
    (WRITE, True),
    (BACK, False),
    ("", False),
    (BACK, True),
    (SAVE, False),
    (WRITE, False),
)
"""One after the other: a phase, and whether the process counts calls in it or a clock runs."""
PATIENCE = 60.0


class Killed(NamedTuple):
    """How a process ended."""

    sent: bytes
    during: tuple[str, ...]  # the phases that were under way; of one that completed none
    completed: bool


class Kind:
    """One kind of run, with its result when it is not killed."""

    def __init__(self, framework: str, variant: Variant, root: Path) -> None:
        self.framework, self.variant, self.root = framework, variant, root
        root.mkdir()
        assert self.run_process(root, None).completed
        self.trace = checks.steps_of(root)
        self.facts = json.loads((root / "end.json").read_text())
        assert self.facts["rollbacks"] >= 2, self.facts

    def run_process(self, root: Path, aim: Aim | None) -> Killed:
        """One process, forked."""
        reader, writer = os.pipe()
        shared = mmap.mmap(-1, len(PHASES))
        at = None
        if aim is not None and aim.calls:
            at = aim.phase, int(aim.part * self.facts["calls"][aim.phase])

        def target() -> None:
            os.close(reader)
            stepped = aim is not None and aim.stepped
            watched = Watched(shared, writer, at, stepped=stepped)
            run_process(self.framework, self.variant, root / "store", root / "trace-0", watched)

        pid = checks.forked(target)
        os.close(writer)
        sent = b"" if aim is None or aim.calls else self._kill(pid, reader, aim)
        _, status = os.waitpid(pid, 0)
        while data := os.read(reader, 1 << 16):
            sent += data
        os.close(reader)
        assert status == 0 or os.WIFSIGNALED(status), f"{root}: not as it must be"
        during = tuple(phase for i, phase in enumerate(PHASES) if shared[i])
        return Killed(sent, () if status == 0 else during, status == 0)

    def _kill(self, pid: int, reader: int, aim: Aim) -> bytes:
        """Waits for the phase, then for some of the time that it takes.

        Without a phase: after the start for some of the time that a process may last, or after as
        many steps as `Aim.part` says.
        """
        sent, until = b"", time.monotonic() + PATIENCE
        steps = (1 if aim.phase else 1 + int(aim.part * (DATA - 2))) if aim.stepped else 0
        begins = BEGUN[aim.phase] if aim.phase else b"" if aim.stepped else READY
        while not _begun(sent, steps, begins) and time.monotonic() < until:
            assert select.select([reader], [], [], PATIENCE)[0], "a child does not get on"
            data = os.read(reader, 1 << 16)
            sent += data
            if not data:
                return sent
        longest = self.facts["seconds"][aim.phase] if aim.phase else self.span
        if aim.phase or not aim.stepped:
            time.sleep(aim.part * longest)
        os.kill(pid, signal.SIGKILL)
        return sent

    @property
    def span(self) -> float:
        """How long a process may last when no phase is aimed at."""
        return 5 * (self.facts["seconds"][WRITE] + self.facts["seconds"][BACK])


def _begun(sent: bytes, steps: int, begins: bytes) -> bool:
    """Whether a child has reported so many steps, and then what is waited for."""
    parts = sent.split(STEPPED, steps)
    return len(parts) > steps and begins in parts[-1]


def run(
    kind: Kind,
    root: Path,
    kills: int,
    first: int,
    rng: random.Random,
    counts: Counter[str],
    *,
    stepped: bool,
) -> None:
    """One run, from the first start to its end; most processes are killed."""
    root.mkdir()
    had, logged = b"", b""
    for number in itertools.count():
        aimed = Aim(*AIMS[(first + number) % len(AIMS)], rng.random(), stepped)
        aim = aimed if number < kills else None
        ended = kind.run_process(root, aim)
        # At its start, that is of what the previous process has left.
        for what in (USABLE, GOOD):
            assert what in ended.sent or what not in had or not ended.sent, f"{root}: {what!r} lost"
        had += ended.sent
        logged = checks.goes_on(root, logged)
        if ended.completed:
            break
        counts["kills"] += 1
        counts["after a step"] += STEPPED in ended.sent
        counts["in a rollback"] += BACK in ended.during
        counts["in a save"] += SAVE in ended.during or WRITE in ended.during
        counts["in both"] += BACK in ended.during and WRITE in ended.during
    checks.whole(root, kind.root)
    facts = json.loads((root / "end.json").read_text())
    for name in ("step", "rollbacks", "weights"):
        assert facts[name] == kind.facts[name], f"{root}: {name} {facts} {kind.facts}"
    checks.same_as(root, kind.trace)
    counts["runs"] += 1
    counts["rollbacks"] += facts["rollbacks"]


def main() -> None:
    framework, root, kills = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    stepped = sys.argv[4:] == ["stepped"]
    warm(framework, root)
    rng, counts = random.Random(framework), Counter[str]()
    kinds: dict[str, Kind] = {}
    for number, name in enumerate(itertools.cycle(VARIANTS)):
        left = kills - counts["kills"]
        if left <= 0:
            break
        if name not in kinds:
            kinds[name] = Kind(framework, VARIANTS[name], root / f"clean-{name}")
        run(kinds[name], root / f"{number}", min(left, 12), number, rng, counts, stepped=stepped)
    print(json.dumps(counts))


def warm(framework: str, root: Path) -> None:
    """Everything that can be imported before the fork; no backend of JAX is begun."""
    if framework == "torch":
        import healcore.torch.driver
        import healcore.torch.store
    else:
        import jax

        import healcore.jax.driver
        import healcore.jax.store

        # Filled by the runs that are not killed: the others compile nothing.
        jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    del healcore


@pytest.mark.parametrize("kills", [4, pytest.param(100, marks=pytest.mark.stress)])
@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("aim", [[], ["stepped"]], ids=["any time", "after a step"])
def test_killed_again_and_again(aim, framework, kills, in_memory):
    program = "-m", "tests.healer.test_killed", framework, in_memory, kills, *aim
    done = processes.run(*program, seconds=600 * kills)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == kills
    if aim:
        assert counts["after a step"] == kills
    assert counts["in a rollback"] >= max(1, kills // 10)
    assert counts["in a save"] >= max(1, kills // 10)


if __name__ == "__main__":
    main()
