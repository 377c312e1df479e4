"""A slow disk changes no rollback target, and a power loss costs only what was not flushed.

In the test of a power loss the checkpoints are on an ext4 image in a file. A copy of the file at
some moment is the disk after a power loss then: it lacks what the file system still held in memory.
The options of the mount make the file system flush late and in any order.
"""

import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from healcore.jax import store as jax_stores
from healcore.runtime.store.checkpoints import Keep
from healcore.torch import store as torch_stores
from tests import forked_programs
from tests.healer.run_directory import events_of
from tests.healer.training_loops import BOTH_FRAMEWORKS, Faults, loop_of, rules, train
from tests.open_run import run_of

pytestmark = pytest.mark.slow  # test_power_failures.py has a simulated disk


def outcome_of(framework: str, store: Any, log: Path, delay: float = 0.0) -> Any:
    """What a run has done on a disk that takes `delay` or more for some writes and proofs."""
    with pytest.MonkeyPatch.context() as patch:

        def delay_some(kind: Any, name: str, period: int) -> None:
            function = getattr(kind, name)

            def late(store: Any, *args: Any) -> Any:
                saved: Any = args[1] if name == "_write" else args[0]
                time.sleep(delay * (getattr(saved, "step", saved) % period))
                return function(store, *args)

            patch.setattr(kind, name, late)

        for kind in (torch_stores.DCPStore, jax_stores.OrbaxStore):
            delay_some(kind, "_write", 3)
            delay_some(kind, "verify", 2)
        # The second bad batch is in the region of the first: the run goes deeper.
        loop = loop_of(framework, Faults(always=[43, 46]), rules())
        options = {"store": store, "events": log, "keep": Keep(good=3, candidates=3)}
        train(loop, rules(), range(70), **options)
    found = events_of(log)
    return {
        "back": [(e["onset"], e["checkpoint"]) for e in found if e["kind"] == "rollback"],
        "saved": [e["step"] for e in found if e["kind"] == "save"],
        "failed": [e["problem"] for e in found if e["kind"] == "save_failed"],
        "good": sorted({e["step"] for e in found if e["kind"] == "good"}),
        "weights": [each.tobytes() for each in loop.weights()],
    }


@pytest.mark.parametrize(
    ("framework", "make"), [("torch", torch_stores.DCPStore), ("torch", Path), ("jax", Path)]
)
def test_the_rollback_target_depends_only_on_the_steps(framework, make, tmp_path):
    fast = outcome_of(framework, make(tmp_path / "fast"), tmp_path / "fast.jsonl")
    assert [onset for onset, _ in fast["back"]] == [43, 45]
    assert fast["good"][:8] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert fast["failed"] == []
    # A delay is as long as many steps.
    slow = outcome_of(framework, make(tmp_path / "slow"), tmp_path / "slow.jsonl", 0.03)
    assert slow == fast


PROGRAM = "tests.healer.test_unreliable_disks"


def command(*arguments: object) -> subprocess.CompletedProcess[str]:
    text = list(map(str, arguments))
    return subprocess.run(text, capture_output=True, text=True, check=False)


@contextlib.contextmanager
def mounted(image: Path, at: Path) -> Iterator[Path]:
    at.mkdir(exist_ok=True)
    options = "loop,commit=300,noauto_da_alloc,data=writeback"
    done = command("mount", "-t", "ext4", "-o", options, image, at)
    if done.returncode:
        pytest.skip(f"no image can be mounted: {done.stderr}")
    try:
        yield at
    finally:
        command("umount", at)


@pytest.fixture
def image(tmp_path) -> Path:
    if not hasattr(os, "geteuid") or os.geteuid() or not shutil.which("mkfs.ext4"):
        pytest.skip("needs root and mkfs.ext4")
    path = tmp_path / "disk.img"
    with path.open("wb") as file:
        file.truncate(64 << 20)
    command("mkfs.ext4", "-q", path)
    return path


def result(done: subprocess.CompletedProcess[str]) -> str:
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


def checkpoints(store: Path) -> list[str]:
    """Their names begin with their steps."""
    return [path.name for path in store.glob("step-*")]


@BOTH_FRAMEWORKS
def test_a_run_resumes_from_what_was_flushed(framework, image, tmp_path):
    undisturbed = result(forked_programs.run("-m", PROGRAM, framework, tmp_path / "plain"))
    random.seed(framework)
    written = tmp_path / "written"
    images = []
    with mounted(image, tmp_path / "disk") as disk:
        arguments = "-m", PROGRAM, framework, disk / "store", written
        with forked_programs.ForkedProgram(*arguments, stderr=subprocess.PIPE) as program:
            while not written.exists():
                assert program.poll() is None, program.communicate()[1]
                time.sleep(0.01)
            for number in range(6):
                time.sleep(random.uniform(0.05, 0.4))
                known = json.loads(written.read_text())
                images.append((shutil.copy(image, tmp_path / f"{number}.img"), known))
            program.kill()
    for copy, known in images:
        with mounted(Path(copy), tmp_path / "disk") as disk:
            assert max(checkpoints(disk / "store"), default="") >= max(known, default="")
            done = forked_programs.run("-m", PROGRAM, framework, disk / "store")
            assert result(done) == undisturbed


if __name__ == "__main__":
    framework, folder, *rest = sys.argv[1:]

    def before(healer, number: int) -> None:
        if rest:
            time.sleep(0.05)
            run_of(healer).store.wait()
            temporary = Path(rest[0] + ".new")
            temporary.write_text(json.dumps(checkpoints(Path(folder))))
            temporary.rename(rest[0])

    loop = loop_of(framework, Faults(always=[13, 31]), rules())
    train(loop, rules(), range(40), store=Path(folder), before=before)
    print(sum(float(abs(weights).sum()) for weights in loop.weights()))
