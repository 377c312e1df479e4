"""Runs whose processes are killed again and again, each beside a run that is not killed.

The frameworks are imported once, and a child is forked for every start, or one for each rank. What
the run that is not killed did at every step is what the killed ones must do too.
"""

import faulthandler
import functools
import hashlib
import importlib
import itertools
import json
import mmap
import os
import random
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from healcore.events import read
from healcore.runtime.reporting import postmortem
from healcore.runtime.run.checkpoints.saver import Saver
from healcore.runtime.run.rollback.recovery import Recovery
from healcore.runtime.store.store import CheckpointStore

NAME = "healcore.events.jsonl"
TIMEOUT = 60
"""The time-out of a process group in seconds."""
BOUND = 30.0
"""Seconds until torchrun's agent kills ranks that do not end after SIGTERM: more is a hang."""
PATIENCE = 120
"""Seconds after which a process shows where it is, and ends: a failure of the test."""

STEP, SAVE, WRITE, BACK = "step", "save", "write", "rollback"
PHASES = {STEP: 0.01, SAVE: 0.01, WRITE: 0.05, BACK: 0.05}
"""About how long each lasts, in seconds: a step, the copy of the state, its write behind the loop,
and a rollback."""
CALLS = ("fsync", "rename", "replace", "write", "unlink", "mkdir", "rmdir")
"""Functions of `os` that change the disk; the framework's own writing of arrays is not in it."""
AFTER_ANOTHER = {1, 128 + signal.SIGTERM, -signal.SIGTERM}
"""Exit statuses of a rank after another one's death: its own error, or what SIGTERM leads to, in
the run or behind its end."""


class Aim(NamedTuple):
    """When a process kills itself."""

    phase: str
    occurrence: int  # how often the phase has begun by then, from 1
    rank: int | None = None  # None: all of them
    delay: float = 0.0  # seconds after its beginning
    calls: int | None = None  # or after so many of CALLS in it, and at its end at the latest


def aim_of(seed: object, start: int, kills: int, world: int = 1) -> Aim | None:
    """The aim of a start; None: nobody is killed."""
    if start >= kills:
        return None
    rng = random.Random(f"{seed}/{start}")
    phase = (BACK, WRITE, STEP, SAVE, BACK, WRITE)[start % 6]
    occurrence = rng.randint(1, {STEP: 12, BACK: 1}.get(phase, 3))
    calls = rng.randrange(12) if phase in (BACK, WRITE) and rng.random() < 0.5 else None
    delay = rng.random() ** 2 * PHASES[phase]
    return Aim(phase, occurrence, rng.randrange(world), delay, calls)


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Watched:
    """Marks the phases under way in a file that outlives the process, and kills it at its aim."""

    def __init__(self, path: Path, aim: Aim | None, rank: int = 0) -> None:
        path.write_bytes(bytes(len(PHASES)))
        with path.open("r+b") as file:
            self._shared = mmap.mmap(file.fileno(), len(PHASES))
        self._aim = aim if aim and aim.rank in (None, rank) else None
        self._begun = Counter[str]()
        self._calls_left: int | None = None
        for owner, name, phase in (
            (Saver, "save_state_as", SAVE),
            (CheckpointStore, "_write", WRITE),
            (Recovery, "_restore", BACK),
        ):
            self._watch(owner, name, partial(self.begin, phase), partial(self.end, phase))
        if self._aim and self._aim.calls is not None:
            for name in CALLS:
                self._watch(os, name, self._count)

    def _watch(self, owner: Any, name: str, before: Any, after: Any = lambda: None) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def watched(*args: Any, **kwargs: Any) -> Any:
            before()
            result = function(*args, **kwargs)
            after()
            return result

        setattr(owner, name, watched)

    def _count(self) -> None:
        if self._calls_left is not None:
            self._calls_left -= 1
            if self._calls_left < 0:
                die()

    def begin(self, phase: str) -> None:
        self._shared[[*PHASES].index(phase)] = 1
        self._begun[phase] += 1
        if self._aim and (phase, self._begun[phase]) == self._aim[:2]:
            self._calls_left = self._aim.calls
            if self._calls_left is None and not self._aim.delay:
                die()
            if self._calls_left is None:
                timer = threading.Timer(self._aim.delay, die)
                timer.daemon = True
                timer.start()

    def end(self, phase: str) -> None:
        if self._aim and self._calls_left is not None and phase == self._aim.phase:
            die()
        self._shared[[*PHASES].index(phase)] = 0


def digest(*values: Any) -> str:
    """Digest of arrays, and of values as JSON."""
    found = hashlib.sha256()
    for value in values:
        is_array = hasattr(value, "tobytes")
        found.update(value.tobytes() if is_array else json.dumps(value, sort_keys=True).encode())
    return found.hexdigest()[:16]


def forked(target: Callable[[], None], errors: Path | None = None) -> int:
    """Calls `target` in a child, which ends as Python does; returns its process id.

    Standard error goes to the file `errors`. SIGUSR1 shows there where the child is.
    """
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        if errors is not None:
            os.dup2(os.open(errors, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), 2)
        faulthandler.register(signal.SIGUSR1)
        target()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        print(ended, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


class Ended(NamedTuple):
    statuses: list[int]  # exit statuses; of a killed rank the negative number of the signal
    errors: list[str]  # what each wrote to standard error


def run_ranks(
    root: Path,
    world: int,
    target: Callable[[int], None],
    *,
    seconds: float = TIMEOUT,
    kills_after: float | None = None,
    alone: bool = False,
) -> Ended:
    """Forks ranks, each of which calls `target` in a process group with that time-out.

    When a rank has ended with an error, the others get SIGTERM, as from the agent of torchrun, and
    SIGKILL `kills_after` seconds later. AssertionError instead of SIGKILL if that is None, after
    BOUND seconds. `alone`: one process without a group.
    """
    if not alone:
        for name in ("torch._dynamo", "healcore.torch.driver"):
            importlib.import_module(name)  # the first step would, in every rank
    root.mkdir(exist_ok=True)
    file = root / f"rendezvous-{time.monotonic_ns()}"
    files = [root / f"stderr-{rank}" for rank in range(world)]

    def begin(rank: int) -> None:
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        if not alone:
            options = {"rank": rank, "world_size": world, "timeout": timedelta(seconds=seconds)}
            dist.init_process_group("gloo", f"file://{file}", **options)
        target(rank)

    left = {forked(partial(begin, rank), files[rank]): rank for rank in range(world)}
    statuses = [0] * world
    until = float("inf")
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            code = os.waitstatus_to_exitcode(status)
            statuses[left.pop(pid)] = code
            if code and until == float("inf"):
                until = time.monotonic() + (BOUND if kills_after is None else kills_after)
                for other in left:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > until:
            if kills_after is None:
                for other in left:
                    os.kill(other, signal.SIGUSR1)  # shows where it is
                time.sleep(1.0)
            for other in left:
                os.kill(other, signal.SIGKILL)
            texts = "\n".join(each.read_text()[-4000:] for each in files)
            assert kills_after is not None, f"{root}: ranks {[*left.values()]} hang\n{texts}"
            until = float("inf")
        else:
            time.sleep(0.005)
    file.unlink(missing_ok=True)
    return Ended(statuses, [each.read_text() for each in files])


class Kind:
    """One kind of run, with what it does when nobody is killed.

    `start` is one start of one rank to the end of the run in a directory. It appends a line for
    each step to `trace-RANK`, calls `begin(STEP)`, and writes `end-RANK.json`.
    """

    def __init__(self, root: Path, start: Callable[[Path, Watched], None], world: int = 1) -> None:
        self.root, self.world, self._start = root, world, start
        assert self.start(root, 0, None).statuses == [0] * world
        self.steps = steps_of(root)
        self.facts = facts_of(root)
        assert min(each["rollbacks"] for each in self.facts) >= 2, self.facts

    def start(self, root: Path, number: int, aim: Aim | None) -> Ended:
        def target(rank: int) -> None:
            self._start(root, Watched(root / f"phases-{number}-{rank}", aim, rank))

        return run_ranks(root, self.world, target, alone=self.world == 1)

    def killed(self, root: Path, kills: int, seed: object) -> Counter[str]:
        """A run with up to `kills` kills, to its end; counts what was under way at each."""
        counts = Counter[str]()
        logged = b""
        for number in itertools.count():
            aim = aim_of(seed, number, kills, self.world)
            ended = self.start(root, number, aim)
            logged = goes_on(root, logged)
            if ended.statuses == [0] * self.world:  # also if it came to its end before its aim
                break
            assert aim is not None, ended
            statuses = dict(enumerate(ended.statuses))
            assert statuses.pop(aim.rank or 0) == -signal.SIGKILL, (aim, ended)
            assert {*statuses.values()} <= AFTER_ANOTHER, (aim, ended)
            marks = (root / f"phases-{number}-{aim.rank}").read_bytes()
            under_way = {phase for phase, mark in zip(PHASES, marks, strict=True) if mark}
            counts["kills"] += 1
            counts["in a rollback"] += BACK in under_way
            counts["in a save"] += bool(under_way & {SAVE, WRITE})
            counts["in a step"] += STEP in under_way
        assert facts_of(root) == self.facts, (root, facts_of(root), self.facts)
        for at, state in steps_of(root).items():
            assert self.steps.get(at) == state, f"{root}: {at} {state} {self.steps.get(at)}"
        whole(root, self.root)
        return counts


def facts_of(root: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text()) for path in sorted(root.glob("end-*.json"))]


def steps_of(root: Path) -> dict[tuple[int, int, int], list[Any]]:
    """(rank, rollbacks so far, steps done) -> the next batch and digests of weights and engines.

    Steps that a later process has repeated must have come out the same.
    """
    found: dict[tuple[int, int, int], list[Any]] = {}
    for path in sorted(root.glob("trace-*")):
        for line in path.read_text().splitlines():
            rollbacks, step, *state = json.loads(line)
            place = int(path.name[6:]), rollbacks, step
            earlier = found.setdefault(place, state)
            assert earlier == state, f"{root}: {place}: {earlier}, {state}"
    return found


def logged_changes(root: Path) -> set[tuple[Any, ...]]:
    """Each rollback (number, onset, checkpoint), as logged."""
    events = read(root / "store" / NAME).events
    back = [(e["number"], e["onset"], e["checkpoint"]) for e in events if e["kind"] == "rollback"]
    assert len({each[0] for each in back}) == len(back), f"{root}: a rollback is logged twice"
    return {*back}


def goes_on(root: Path, before: bytes) -> bytes:
    """The events file now; checks that its earlier content is unchanged."""
    path = root / "store" / NAME
    now = path.read_bytes() if path.exists() else b""
    assert now.startswith(before), f"{root}: earlier events have changed"
    if now:
        history = read(path)
        assert history.problems == [], history.problems
        for events in history.by_process().values():
            numbers = [event["seq"] for event in events]
            assert numbers == list(range(len(numbers))), f"{root}: {numbers}"
    return now


def whole(root: Path, clean: Path) -> None:
    """At the end: the rollbacks of the run that was not killed, and each death its cause."""
    logged, expected = logged_changes(root), logged_changes(clean)
    assert logged == expected, f"{root}: {logged}, not {expected}"
    path = root / "store" / NAME
    for name, events in read(path).by_process().items():
        if events[0]["kind"] != "start":
            continue
        ends = [event["ending"] for event in events if event["kind"] == "end"]
        found = postmortem.read(postmortem.path_for(path, name))
        assert found["ending"] in (ends or ["gone"]), f"{root}: run {name}"
