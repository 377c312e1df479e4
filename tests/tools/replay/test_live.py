"""A live run and the replay of its metrics: the same causes and orders, step by step."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from healcore.core.verdict import Action, Cause, names
from healcore.policy import load
from healcore.tools.replay import replay
from tests.healer.training_loops import Faults, loop_of, rules, train
from tests.tools.replay import logs


def live_and_replayed(path: Path, policy):
    """The decisions of a live run and of its replay, each the fields of a line, and the summary.

    Where the budget was spent, without what the replay adds.
    """
    live = [
        (
            [each.name for each in Cause if each.name in line["cause"]],
            [each.name for each in Action if each.name in line["action"]],
            line["skip"],
            np.float32(line["grad_scale"]),
            np.float32(line["lr_scale"]),
        )
        for line in map(json.loads, path.open())
    ]
    found = [([], [], False, np.float32(1), np.float32(1))] * len(live)
    result = replay(logs.trace(path), policy)
    for row in result:
        action = row.action & ~Action.ROLLBACK if row.spent else row.action
        scales = np.float32(row.grad_scale), np.float32(row.lr_scale)
        found[row.index] = [*names(row.cause)], [*names(action)], row.skip, *scales
    return live, found, result.summary


@pytest.mark.parametrize("framework", ["torch", "jax"])
@pytest.mark.parametrize("bad", [[23], [2], [9, 30]], ids=["late", "before a save", "twice"])
def test_with_rollbacks(framework, bad, tmp_path):
    """With rollbacks to a checkpoint and to the beginning."""
    path = tmp_path / "run.metrics.jsonl"
    loop = loop_of(framework, Faults(once=bad), rules())
    facts = train(loop, rules(), range(40), metrics=path)
    assert facts["rollbacks"] == len(bad)
    live, found, summary = live_and_replayed(path, rules())
    assert found == live
    assert summary.rollbacks == len(bad)
    orders = [row for row in replay(logs.trace(path), rules()) if row.action & Action.ROLLBACK]
    assert [row.attempt for row in orders] == list(range(len(bad)))


def test_with_a_preset(tmp_path):
    """Clipping from the first step on, a batch whose loss is NaN, nothing that goes back."""
    path = tmp_path / "run.metrics.jsonl"
    loop = loop_of("torch", Faults(always=[50]), load("pretraining"))
    train(loop, load("pretraining"), range(90), metrics=path)
    live, found, summary = live_and_replayed(path, "pretraining")
    assert sum(line[3] < 1 for line in live) > 0
    assert found == live
    assert summary.causes["NONFINITE_LOSS"] == 1


def test_a_run_that_its_policy_stopped(tmp_path):
    """The replay marks the last order of a live run as spent."""
    path = tmp_path / "run.metrics.jsonl"
    policy = rules(recoveries=1)
    loop = loop_of("torch", Faults(always=range(20, 60)), policy)
    with pytest.raises(SystemExit):
        train(loop, policy, range(60), metrics=path)
    live, found, summary = live_and_replayed(path, policy)
    assert found == live
    assert (summary.rollbacks, summary.spent) == (2, 1)
    assert summary.stopped_step is not None
