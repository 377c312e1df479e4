"""Healed runs that are killed with SIGKILL, again and again, until they complete.

    python -m tests.healer.repeated_kills FRAMEWORK ROOT KILLS [stepped]

With `stepped` every kill comes after the process has finished a step; else many land in its start.
It imports the framework once and forks a child for every start. Before the first run of a kind is
one that is never killed: what it did at every step is what the killed ones must do too. Prints one
JSON line with what was counted; ends with an error at the first thing that is not as it must be.
"""

from __future__ import annotations

import itertools
import json
import mmap
import os
import random
import select
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

from tests.healer import killed_run_checks as checks
from tests.healer.killed_process import (
    BACK,
    BEGUN,
    DATA,
    GOOD,
    PHASES,
    READY,
    SAVE,
    STEPPED,
    USABLE,
    VARIANTS,
    WRITE,
    Aim,
    Variant,
    Watched,
    run_process,
)

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
    during: tuple[str, ...]
    """The phases that were under way; of one that completed none."""
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


if __name__ == "__main__":
    main()
