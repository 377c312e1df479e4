"""SIGKILL in steps, saves and rollbacks: the run ends as if never killed.

This file is a program too: python -m tests.healer.test_killed FRAMEWORK ROOT KILLS. Prints one JSON
line with what was counted; ends with an error at the first thing that is not as it must be.
"""

import importlib
import itertools
import json
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import jax
import pytest

from healcore.jax.store import OrbaxStore
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.store import DCPStore
from tests import forked_programs
from tests.healer.killed_runs import STEP, Kind, Watched, digest
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, train

pytestmark = pytest.mark.slow  # many processes; kills without processes: test_restarted_loops.py

BAD = 13, 14, 31
"""The batches that are NaN each time."""


def start(framework: str, root: Path, watched: Watched) -> None:
    """Checks what is on disk, then trains to the end, writing each step's state."""
    check(framework, root)
    policy = rules(recoveries=6)
    data = range(45)

    def run() -> dict[str, Any]:
        loop = loop_of(framework, Faults(always=BAD), policy)

        def before(healer: Any, number: int) -> None:
            watched.end(STEP)
            loop.state = healer.state
            state = digest(*loop.weights()), digest(trainer_access_of(healer).driver.engines())
            file.write(json.dumps([healer.rollbacks, healer.step, number, *state]) + "\n")
            watched.begin(STEP)

        result = train(loop, policy, data, before=before, store=root / "store", console=False)
        weights = digest(*loop.weights())
        return {"step": result.step, "rollbacks": result.rollbacks, "weights": weights}

    with (root / "trace-0").open("a", buffering=1) as file:
        end = run()  # trains nothing if it was killed just before it logged its end
    (root / "end-0.json").write_text(json.dumps(end))


def check(framework: str, root: Path) -> None:
    """All checkpoints are intact; once there is a usable or known-good one, there always is."""
    store: Any = (DCPStore if framework == "torch" else OrbaxStore)(root / "store")
    had = root / "had"
    saves = [each for each in store.checkpoints() if each.status != "abandoned" and each.finite]
    for each in saves:
        store.verify(each.step)
    assert store.damaged() == [], store.damaged()
    there = {"usable": bool(saves), "good": any(each.status == "good" for each in saves)}
    earlier = json.loads(had.read_text()) if had.exists() else there
    assert all(there[name] for name in there if earlier[name]), (earlier, there)
    had.write_text(json.dumps(there))


def main(framework: str, root: Path, kills: int) -> None:
    """Imports everything before the fork; no backend of JAX is begun."""
    importlib.import_module(f"healcore.{framework}.driver")
    if framework == "jax":
        # Filled by the runs that are not killed: the others compile nothing.
        jax.config.update("jax_compilation_cache_dir", str(root / "compiled"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    counts = Counter[str]()
    kind = Kind(root / "clean", partial(start, framework))
    for number in itertools.count():
        left = kills - counts["kills"]
        if left <= 0:
            break
        counts += kind.killed(root / f"{number}", min(left, 12), f"{framework}-{number}")
    print(json.dumps(counts))


@pytest.mark.parametrize("kills", [12, pytest.param(200, marks=pytest.mark.stress)])
@BOTH_FRAMEWORKS
def test_killed_again_and_again(framework, kills, tmp_path):
    program = "-m", "tests.healer.test_killed", framework, tmp_path, kills
    done = forked_programs.run(*program, timeout=600 * kills)
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout.splitlines()[-1])
    assert counts["kills"] == kills
    for under_way in ("in a step", "in a rollback", "in a save"):
        assert counts[under_way] >= max(1, kills // 10), counts


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
