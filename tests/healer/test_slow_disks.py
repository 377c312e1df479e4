"""A slow disk changes no rollback target. Times are in steps."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from healcore.jax import store as jax_stores
from healcore.runtime.loop.saver import Saver
from healcore.runtime.recovery.restoring import Restorer
from healcore.runtime.store import Keep
from healcore.torch import store as torch_stores
from tests.healer.run_directory import events_of
from tests.healer.training_loops import Faults, loop_of, rules, train

EVERY = 5
BAD = [43, 46]
"""The second one is in the region of the first: it goes deeper."""


class Gates:
    """Holds up what a disk does until the run has come so many steps further, or waits for it.

    Args:
        writes: steps that the write of a checkpoint takes, by its step.
        proofs: steps from it until its verification is done.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, writes: Any, proofs: Any) -> None:
        self._step, self._free = 0, False
        self._changed = threading.Condition()
        wait, roll_back, save_last = (Saver.wait, Restorer.roll_back, Saver.save_last)

        def waits(checkpoints: Any) -> None:
            self.open(True)
            wait(checkpoints)

        def ends(last: Any, *args: Any, **options: Any) -> None:
            self.open(True)
            save_last(last, *args, **options)

        def goes_back(restorer: Any, order: Any) -> Any:
            result = roll_back(restorer, order)  # begins with `wait`
            self.open(False)
            return result

        monkeypatch.setattr(Saver, "wait", waits)
        monkeypatch.setattr(Restorer, "roll_back", goes_back)
        monkeypatch.setattr(Saver, "save_last", ends)
        for kind in (torch_stores.DCPStore, jax_stores.OrbaxStore):
            self._hold_up(monkeypatch, kind, writes, proofs)

    def _hold_up(self, monkeypatch: Any, kind: Any, writes: Any, proofs: Any) -> None:
        write, verify = kind._write, kind.verify

        def writes_late(store: Any, copy: Any, folder: Path) -> Any:
            self._when(copy.step + writes(copy.step))
            return write(store, copy, folder)

        def verifies_late(store: Any, step: int) -> Any:
            self._when(step + proofs(step))
            return verify(store, step)

        monkeypatch.setattr(kind, "_write", writes_late)
        monkeypatch.setattr(kind, "verify", verifies_late)

    def step(self, healer: Any, number: int) -> None:
        """Before each step of the loop."""
        with self._changed:
            self._step = healer.step
            self._changed.notify_all()

    def open(self, free: bool) -> None:
        """Whether no disk operation is held up."""
        with self._changed:
            self._free = free
            self._changed.notify_all()

    def _when(self, step: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: self._free or self._step >= step, 100)


STORES = {
    "dcp": ("torch", torch_stores.DCPStore),
    "torch tiers": ("torch", lambda at: at),
    "orbax": ("jax", jax_stores.OrbaxStore),
    "jax tiers": ("jax", lambda at: at),
}
DISKS = {
    "a fast disk": (lambda step: 0, lambda step: 0),
    "slow writes": (lambda step: 4, lambda step: 0),
    "now and then": (lambda step: 4 * (step % 3 == 0), lambda step: 9 * (step % 2)),
}
"""Steps from a checkpoint until it is written, and until it is verified. A checkpoint is verified
after the next save, and this is done before the second save after that, which waits for it."""


def outcome_of(kind: str, folder: Path, monkeypatch: Any, disk: Any) -> dict[str, Any]:
    """The outcome of a run on a slow disk."""
    framework, make = STORES[kind]
    loop = loop_of(framework, Faults(always=BAD), rules())
    with monkeypatch.context() as patch:
        gates = Gates(patch, *disk)
        log = folder.with_suffix(".jsonl")
        options = {"store": make(folder), "events": log, "keep": Keep(good=3, candidates=3)}
        train(loop, rules(), range(70), before=gates.step, save_every=EVERY, **options)
    found = events_of(log)
    return {
        "back": [(e["onset"], e["checkpoint"]) for e in found if e["kind"] == "rollback"],
        "saved": [e["step"] for e in found if e["kind"] == "save"],
        "failed": [e["problem"] for e in found if e["kind"] == "save_failed"],
        "good": sorted({e["step"] for e in found if e["kind"] == "good"}),
        "weights": [each.tobytes() for each in loop.weights()],
    }


@pytest.mark.parametrize("kind", STORES)
def test_the_rollback_target_depends_only_on_the_steps(kind, tmp_path, monkeypatch):
    outcomes = {
        name: outcome_of(kind, tmp_path / name, monkeypatch, disk) for name, disk in DISKS.items()
    }
    fast = outcomes["a fast disk"]
    assert [onset for onset, _ in fast["back"]] == [43, 45]
    assert fast["good"][:8] == [0, 5, 10, 15, 20, 25, 30, 35]
    assert fast["failed"] == []
    for name, other in outcomes.items():
        assert other == fast, name
