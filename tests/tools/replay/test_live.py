"""A live run and the replay of its metrics: the same causes and orders, step by step."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause, names
from healcore.policy import load
from healcore.tools.replay import replay
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.tools.replay import logs

Step = tuple[tuple[str, ...], tuple[str, ...], bool, np.float32, np.float32]
"""Causes, orders, skip, grad_scale, lr_scale."""


def flags(kind, names) -> tuple[str, ...]:
    return tuple(each.name for each in kind if each.name in names)


def live_steps(path: Path) -> Iterator[Step]:
    """The decisions of the live run, line by line."""
    for line in map(json.loads, path.open()):
        yield (
            flags(Cause, line["cause"]),
            flags(Action, line["action"]),
            line["skip"],
            np.float32(line["grad_scale"]),
            np.float32(line["lr_scale"]),
        )


def replayed(path: Path, policy, rows: int):
    """The same from the replay; where the budget was spent, without what the replay adds."""
    found: list[Step] = [((), (), False, np.float32(1), np.float32(1))] * rows
    result = replay(logs.trace(path), policy)
    for row in result:
        action = row.action & ~Action.ROLLBACK if row.spent else row.action
        found[row.index] = (
            tuple(names(row.cause)),
            tuple(names(action)),
            row.skip,
            np.float32(row.grad_scale),
            np.float32(row.lr_scale),
        )
    return found, result.summary


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("bad", [[23], [2], [9, 30]], ids=["late", "before a save", "twice"])
def test_with_rollbacks(framework, bad, tmp_path):
    """With rollbacks to a checkpoint and to the beginning."""
    path = tmp_path / "run.metrics.jsonl"
    loop = loop_of(framework, Faults(once=bad), rules())
    facts = train(loop, rules(), range(40), metrics=path)
    assert facts["rollbacks"] == len(bad)
    live = list(live_steps(path))
    found, summary = replayed(path, rules(), len(live))
    assert found == live
    assert summary.rollbacks == len(bad)
    orders = [row for row in replay(logs.trace(path), rules()) if row.action & Action.ROLLBACK]
    assert [row.attempt for row in orders] == list(range(len(bad)))


def test_with_a_preset(tmp_path):
    """Clipping from the first step on, a batch whose loss is NaN, nothing that goes back."""
    path = tmp_path / "run.metrics.jsonl"
    loop = loop_of("torch", Faults(always=[50]), load("pretraining"))
    train(loop, load("pretraining"), range(90), metrics=path)
    live = list(live_steps(path))
    assert sum(line[3] < 1 for line in live) > 0
    found, summary = replayed(path, "pretraining", len(live))
    assert found == live
    assert summary.causes["NONFINITE_LOSS"] == 1


def test_a_run_that_its_policy_stopped(tmp_path):
    """The replay marks the last order of a live run as spent."""
    path = tmp_path / "run.metrics.jsonl"
    policy = rules(recoveries=1)
    loop = loop_of("torch", Faults(always=range(20, 60)), policy)
    with pytest.raises(SystemExit):
        train(loop, policy, range(60), metrics=path)
    live = list(live_steps(path))
    found, summary = replayed(path, policy, len(live))
    assert found == live
    assert (summary.rollbacks, summary.spent) == (2, 1)
    assert summary.stopped_step is not None
