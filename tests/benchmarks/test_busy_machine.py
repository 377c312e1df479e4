"""One seed makes the same run on an idle and on a busy machine: no decision reads the clock."""

import hashlib
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

import healcore
from benchmarks.healbench.running import DONE, Job, Result, run_all, run_one
from healcore.events.process import Process

pytestmark = pytest.mark.slow  # 20 runs of a benchmark

ARM, SEED, LIMIT_S = "healer_ask", 1, 900.0
TASKS = {
    "torch": (
        "optimizer_sgd", "dropout_on", "small_batches_on", "head_reset", "nan_batches",
        "window_20_30x", "layer_50x", "flipped_moment", "slow_damage", "garbage_gradients_middle",
    ),
    "jax": (
        "mixup_on", "summed_loss_sgd", "longer_cycles", "head_reset", "auxiliary_head",
        "nan_burst", "garbage_gradients_middle", "momentum_1.1_middle", "decay_100_middle",
        "shifted_labels_late",
    ),
}  # fmt: skip
"""Healthy tasks and faulty tasks. Half of them roll back."""
FOLDER = "HEALCORE_TEST_EVENTS"
"""Environment variable that names the folder of a worker's events."""
OF_PROCESS = {"time", "mono", "seconds", "run", "environment", *Process._fields}
"""Fields of an event that differ between two runs of one program."""


def recorded(job: Job) -> Result:
    """In a worker process: runs a job, writes its events and the losses of its comparisons."""
    original = healcore.Healer
    path = _path(Path(os.environ[FOLDER]), job)
    losses = hashlib.sha256()
    count = 0

    def healer(*arguments: Any, loss_fn: Any, **options: Any) -> Any:
        def asked(*given: Any) -> Any:
            nonlocal count
            loss = loss_fn(*given)
            with suppress(TypeError):  # while JAX traces it
                losses.update(struct.pack("d", float(loss)))
                count += 1
            return loss

        logging = healcore.Logging(events=path)
        return original(*arguments, loss_fn=asked, logging=logging, **options)

    with _replaced(healcore, "Healer", healer):
        result = run_one(job)
    path.with_suffix(".losses").write_text(f"{count} {losses.hexdigest()}")
    return result


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextmanager
def busy_processes(count: int) -> Iterator[None]:
    spin = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
        assert all(each.poll() is None for each in processes), "busy until the end"
    finally:
        for each in processes:
            each.kill()
            each.wait()


def _path(folder: Path, job: Job) -> Path:
    return folder / f"{job.framework}-{job.task}.events.jsonl"


def _events(path: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: x for name, x in line.items() if name not in OF_PROCESS} for line in lines]


def test_a_busy_machine_changes_no_bit_and_no_event(tmp_path, monkeypatch):
    jobs = [Job(framework, task, ARM, SEED) for framework in TASKS for task in TASKS[framework]]
    found: dict[str, dict[Job, Any]] = {}
    for name, busy in (("idle", 0), ("busy", 2)):
        folder = tmp_path / name
        folder.mkdir()
        monkeypatch.setenv(FOLDER, str(folder))
        with busy_processes(busy):
            results = [*run_all(jobs, workers=1, limit=LIMIT_S, run=recorded)]
        assert [each.error for each in results if each.status != DONE] == []
        found[name] = {}
        for each in results:
            path = _path(folder, each.job)
            losses = path.with_suffix(".losses").read_text()
            outcome = (each.weights, each.metric, each.rollbacks, each.steps)
            found[name][each.job] = (_events(path), losses, outcome)
    assert len(found["idle"]) == 20
    rollbacks = [results[2] for _, _, results in found["idle"].values()]
    assert sum(map(bool, rollbacks)) >= 6
    for job in jobs:
        idle, busy = found["idle"][job], found["busy"][job]
        for one, other in zip(idle[0], busy[0], strict=False):
            assert one == other, job
        assert idle == busy, job
