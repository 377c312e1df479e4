"""Runs of several ranks that are killed and started again, as torchrun does it, without its cost.

    python -m tests.healer.elastic_runs ROOT KIND KILLS

It imports torch once and forks the ranks of every start. When a rank ends with an error the others
get SIGTERM, as from torchrun's agent, and have to end by themselves. A run that is never killed
comes first: what it did at every step is what the killed one must do too. Prints a JSON line with
what was counted; ends with an error at the first thing that is not as it must be.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import re
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from tests.healer import elastic_rank, killed_run_checks
from tests.healer.elastic_rank import BACK, PHASES, SAVE, SECONDS, STEP, WRITE, Aim
from tests.healer.killed_run_checks import forked

BOUND = 30.0
"""Seconds until torchrun's agent kills ranks that do not end after SIGTERM: more is a hang."""


WORLDS = [("FSDP2", [2, 4, 1]), ("DDP", [1, 2])]
"""Kind of run, and the number of ranks of each start."""


AFTER_ANOTHER = {1, 128 + signal.SIGTERM, -signal.SIGTERM}
"""Exit statuses of a rank after another one's death: its own error, or what SIGTERM leads to, in
the run or behind its end."""


class Ended(NamedTuple):
    """How the ranks of one start ended."""

    statuses: list[int]  # exit statuses; of a killed rank the negative number of the signal
    errors: list[str]  # what each wrote to standard error


def run_ranks(
    root: Path,
    world: int,
    target: Callable[[], None],
    *,
    seconds: float = SECONDS,
    rendezvous: str | None = None,
    enter: Callable[[int], None] = lambda rank: None,
    kills_after: float | None = None,
) -> Ended:
    """Forks ranks, each of which calls `target` in a process group with that time-out.

    They meet at the address `rendezvous`, by default a file; `enter` is called first. When a rank
    has ended with an error, the others get SIGTERM, and SIGKILL `kills_after` seconds later.
    AssertionError instead of SIGKILL if that is None, after BOUND seconds.
    """
    root.mkdir(exist_ok=True)
    file = root / f"rendezvous-{time.monotonic_ns()}"
    files = [root / f"stderr-{rank}" for rank in range(world)]
    ranks = {}
    for rank in range(world):

        def begin(rank: int = rank) -> None:
            enter(rank)
            dist.init_process_group(
                "gloo",
                init_method=rendezvous or f"file://{file}",
                rank=rank,
                world_size=world,
                timeout=timedelta(seconds=seconds),
            )
            target()

        ranks[forked(begin, files[rank])] = rank
    statuses, until, left = [0] * world, float("inf"), dict(ranks)
    while left:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in left:
            code = os.waitstatus_to_exitcode(status)
            statuses[left.pop(pid)] = code
            if code and until == float("inf"):
                until = time.monotonic() + (BOUND if kills_after is None else kills_after)
                for other in left:
                    os.kill(other, signal.SIGTERM)
        elif time.monotonic() > until and kills_after is not None:
            for other in left:
                os.kill(other, signal.SIGKILL)
            until = float("inf")
        elif time.monotonic() > until:
            for other in left:
                os.kill(other, signal.SIGUSR1)  # shows where it is
            time.sleep(1.0)
            for other in left:
                os.kill(other, signal.SIGKILL)
                os.waitpid(other, 0)
            texts = "\n".join(each.read_text()[-4000:] for each in files)
            raise AssertionError(f"{root}: ranks {[*left.values()]} have not ended\n{texts}")
        else:
            time.sleep(0.005)
    file.unlink(missing_ok=True)
    return Ended(statuses, [each.read_text() for each in files])


def facts_of(root: Path) -> list[dict[str, Any]]:
    """What each rank reports at the end."""
    return [json.loads(path.read_text()) for path in sorted(root.glob("end-*.json"))]


class Kind:
    """One kind of run, with what it does when nobody is killed."""

    def __init__(self, kind: str, root: Path) -> None:
        self.kind, self.root, self.world = kind, root / f"{kind}-clean", elastic_rank.WORLD
        assert self.start(self.root, 0, None).statuses == [0] * self.world
        self.steps = killed_run_checks.steps_of(self.root)
        self.facts = facts_of(self.root)
        assert [each["rollbacks"] for each in self.facts] == [2] * self.world, self.facts

    def start(self, root: Path, number: int, aim: Aim | None) -> Ended:
        """One start of all ranks."""

        def target() -> None:
            elastic_rank.start(self.kind, root, number, elastic_rank.actions_of(aim))

        return run_ranks(root, self.world, target)

    def killed(self, root: Path, kills: int, seed: int) -> Counter[str]:
        """A run with up to `kills` kills, to its end; counts what was under way at each."""
        counts, logged = Counter[str](), b""
        for number in itertools.count():
            aim = elastic_rank.aim_of(seed, number, kills)
            ended = self.start(root, number, aim)
            logged = killed_run_checks.goes_on(root, logged)
            if ended.statuses == [0] * self.world:  # also if it came to its end before its aim
                break
            assert aim is not None, ended
            assert ended.statuses[aim.rank] == -signal.SIGKILL, (aim, ended)
            others = {status for rank, status in enumerate(ended.statuses) if rank != aim.rank}
            assert others <= AFTER_ANOTHER, (aim, ended)
            marks = (root / f"phases-{number}-{aim.rank}").read_bytes()
            under_way = {phase for phase, mark in zip(PHASES, marks, strict=True) if mark}
            counts["kills"] += 1
            counts["in a rollback"] += BACK in under_way
            counts["in a save"] += bool(under_way & {SAVE, WRITE})
            counts["in a step"] += STEP in under_way
        assert facts_of(root) == self.facts, (facts_of(root), self.facts)
        killed_run_checks.same_as(root, self.steps)
        killed_run_checks.whole(root, self.root)
        return counts


class DiesAt:
    """Kills its rank, as all the others, before a step of this start."""

    def __init__(self, steps: int) -> None:
        self._left = steps

    def begin(self, phase: str) -> None:
        """A step begins."""
        self._left -= 1
        if not self._left:
            os.kill(os.getpid(), signal.SIGKILL)

    def end(self, phase: str) -> None:
        """Nothing."""


def other_worlds(kind: str, root: Path, worlds: Sequence[int]) -> dict[str, Any]:
    """A run that goes on with another number of ranks at each start; returns what they found."""
    found: dict[str, Any] = {"worlds": worlds, "resumed": []}
    seen: dict[tuple[int, int], Any] = {}
    for number, world in enumerate(worlds):
        last = number == len(worlds) - 1
        watched = DiesAt(0 if last else 13)

        def target(watched: DiesAt = watched) -> None:
            facts = elastic_rank.run(kind, root, watched, any_world=True)
            (root / f"end-{dist.get_rank()}.json").write_text(json.dumps(facts))

        for trace in root.glob("trace-*"):
            trace.unlink()
        ended = run_ranks(root, world, target)
        assert ended.statuses == [0 if last else -signal.SIGKILL] * world, ended
        steps = killed_run_checks.steps_of(root)
        if number:
            text = re.search(r"was saved by (\d) ranks, but this run has (\d):", ended.errors[0])
            assert text is not None, ended.errors[0]
            assert int(text[1]) in worlds[:number], text
            assert int(text[2]) == world, text
            # Batch, weights, moments and engines are those that the other ranks had there.
            _, rollbacks, step = min(steps, key=lambda each: each[1:])
            for rank in range(world):
                assert steps[rank, rollbacks, step] == seen[rollbacks, step], (rank, step)
            found["resumed"].append(step)
        seen |= {(each[1], each[2]): state for each, state in steps.items() if each[0] == 0}
    found["rollbacks"] = facts_of(root)[0]["rollbacks"]
    return found


def refused(root: Path) -> list[str]:
    """The last line of each rank's error where every rank has batches of its own."""

    def target() -> None:
        data = range(100 + dist.get_rank(), 190, dist.get_world_size())
        elastic_rank.run("DDP", root, DiesAt(13), data=data, any_world=True)

    run_ranks(root, 2, target)
    ended = run_ranks(root, 4, target)
    assert set(ended.statuses) <= AFTER_ANOTHER, ended.statuses
    return [text.splitlines()[-1] for text in ended.errors]


def main(root: Path, kinds: str, kills: int) -> None:
    """Prints a line for each kind."""
    for name in ("torch._dynamo", "healcore.torch.driver"):
        importlib.import_module(name)  # the first step would, in every rank
    for name in kinds.split(","):
        kind, counts = Kind(name, root), Counter[str]()
        for seed in itertools.count(1):
            left = kills - counts["kills"]
            if not left:
                break
            counts += kind.killed(root / f"{name}-killed-{seed}", left, seed)
        print(json.dumps(counts), flush=True)
    for kind, worlds in WORLDS:
        print(json.dumps(other_worlds(kind, root / f"{kind}-worlds", worlds)), flush=True)
    print(json.dumps(refused(root / "refused")), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
