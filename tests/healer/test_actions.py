"""Which actions are carried out, and when: observing policies, hooks, repeated rollbacks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from healcore import Checkpoints, Healer
from healcore import policy as policies
from healcore.core.verdict import Action
from healcore.runtime.loop.termination import IncompleteRun
from tests.healer.run_directory import events
from tests.healer.run_options import grouped
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, same, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_observe_changes_nothing_and_logs_the_same(framework, tmp_path):
    bad = Faults(always=[5, 23])
    plain = loop_of(framework, Faults(always=[5, 23]))
    for number in range(30):
        plain.step(None, number)
    policy = rules(mode="observe")
    watched = loop_of(framework, bad, policy)
    facts = train(watched, policy, range(30), store=tmp_path)
    assert facts["rollbacks"] == 0
    assert same(watched.weights(), plain.weights())
    orders = events(tmp_path, "order")
    assert orders, "what would have been done is logged"
    assert all(order["observed"] for order in orders)
    assert "ROLLBACK" in orders[0]["action"]
    assert events(tmp_path, "rollback") == []


def test_a_hook_may_override(tmp_path):
    seen = []

    def hook(incident):
        seen.append(incident)
        return Action(0)

    loop = loop_of("torch", Faults(always=[23]))
    facts = train(loop, rules(), range(40), store=tmp_path, on_incident=hook)
    assert facts["rollbacks"] == 0
    assert seen[0].step == 23
    assert seen[0].action & Action.ROLLBACK
    assert seen[0].batches == ((0, 23),)
    assert "0.weight" in {each.name for each in seen[0].evidence}
    assert events(tmp_path, "hook")[0]["action"] == []


def test_two_optimizers_are_one_run(tmp_path):
    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    state = {"a": models[0], "b": models[1], "opt_a": optimizers[0], "opt_b": optimizers[1]}
    faults = Faults(always=[23])
    with Healer(rules(), state=state, store=tmp_path, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(range(40)):
            inputs, targets = map(torch.from_numpy, faults.batch(number))
            for name, model in zip(("opt_a", "opt_b"), models, strict=True):
                loss = (model(inputs) - (targets if name == "opt_b" else inputs[:, :1])).square()
                healer.observe(loss.mean(), name)
                loss.mean().backward()
                state[name].step()
                state[name].zero_grad()
        assert healer.step == 39
        assert healer.rollbacks == 1
    (alarm,) = events(tmp_path, "alarm")
    assert alarm["engine"] == "opt_b"


def test_used_where_it_cannot_be():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with pytest.raises(IncompleteRun), healer, pytest.raises(RuntimeError, match="other framework"):
        healer.update(None)
    with pytest.raises(RuntimeError, match="has ended"):
        next(healer.batches([1]))
    assert healer.step == 0
    with pytest.raises(RuntimeError, match="opened once"), healer:
        pass
    with pytest.raises(ValueError, match="every is a whole number"):
        Healer(rules(), state=loop.state, checkpoints=Checkpoints(every=0))
    with pytest.raises((TypeError, ValueError), match=r"nothing of torch|no healing state"):
        Healer(rules(), state={}).__enter__()


@BOTH
def test_a_run_writes_down_the_policy_with_its_values_replaced(framework, tmp_path):
    replaced = {"rollback": {"probation": 3}, "max_skips": 2}
    policy = policies.load(SKIPS, **replaced)
    train(loop_of(framework, policy=policy), SKIPS, range(4), store=tmp_path, **replaced)
    (start,) = events(tmp_path, "start")
    assert policies.loads(start["policy_toml"]) == policy
    assert start["fingerprint"] == policies.fingerprint(policy) != policies.fingerprint(SKIPS)


@BOTH
def test_hooks_receive_saves_and_rollbacks_and_the_report_is_a_plain_dict(framework, tmp_path):
    """The host reads a step one step later: the bad step is 23, and the rollback begins at 25."""
    saved, rolled_back, running = [], [], []

    def broken(event):
        raise RuntimeError("a hook of the user")

    def before(healer, number):
        running[:] = [healer, healer.report().ending]

    loop = loop_of(framework, Faults(always=[23]), rules())
    hooks = {"on_saved": [broken, saved.append], "on_rollback": rolled_back.append}
    train(loop, rules(), range(40), store=tmp_path, before=before, **hooks)
    (logged,) = events(tmp_path, "rollback")
    (seen,) = rolled_back
    assert (seen["kind"], seen["checkpoint"]) == ("rollback", logged["checkpoint"])
    for each in (seen, logged):
        assert (each["step"], each["onset"], each["batches"]) == (25, 23, [[0, 23]])
    assert [each["step"] for each in saved] == [each["step"] for each in events(tmp_path, "save")]
    problems = [each["problem"] for each in events(tmp_path, "problem")]
    assert sum("a hook of the user" in each for each in problems) == len(saved)
    assert all(np.isfinite(each).all() for each in loop.weights())

    report = running[0].report()
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert (running[1], found["ending"], found["converged"]) == ("running", "completed", True)
    assert (found["steps"], found["attempts"]) == (39, 1)
    assert (found["counts"]["NONFINITE_LOSS"], found["counts"]["skips"]) == (1, 1)
    assert found["rollbacks"][0]["target"] == logged["checkpoint"]
    assert found["history"][0]["onset"] == 23
    assert list(found["optimizers"]) == (["optimizer"] if framework == "torch" else [])
    assert "completed at step 39" in str(report)


ROWS = policies.loads(
    policies.dumps(SKIPS).replace("quiet_steps = 20", "quiet_steps = 2")
    + '\n[[respond]]\nto = ["nonfinite"]\nwhen = { consecutive = 5 }\ndo = ["rollback"]\n'
)
"""A policy that rolls back after five NaN in a row."""


@BOTH
def test_the_onset_is_the_first_step_of_the_row_with_no_checkpoint_on_probation(
    framework, tmp_path
):
    """The newest checkpoint, of step 20, has long passed its probation."""
    loop = loop_of(framework, Faults(always=range(33, 39)), ROWS)
    facts = train(loop, ROWS, range(60), store=tmp_path, save_every=20)
    (rollback,) = events(tmp_path, "rollback")
    assert (rollback["onset"], facts["step"]) == (33, 54)
    assert rollback["batches"] == [[0, number] for number in range(33, 39)]


ALERTS = policies.loads(
    """
schema = 1
name = "alerts"
[detect.nonfinite]
[detect.plateau]
window = 5
patience = 2
[detect.overfit]
max_gap = 0.5
patience = 1
[[respond]]
to = ["nonfinite"]
do = ["skip", "alert"]
[[respond]]
to = ["plateau", "overfit"]
do = ["alert"]
"""
)


class Events(list[Any]):
    """A tracker that keeps the events."""

    def metrics(self, step: int, values: dict[str, float]) -> None:
        pass

    def event(self, event: Any) -> None:
        self.append(event)


def alerted(folder: Path, losses: list[float], *, evaluates: bool, **options: Any) -> None:
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    state = {"model": model, "optimizer": optimizer}
    with Healer(ALERTS, state=state, store=folder, **grouped(options)) as healer:
        for _, wanted in zip(healer.batches(list(losses)), losses, strict=False):
            loss = (model(torch.ones(1)) * 0).sum() + wanted
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if evaluates and healer.step == 35:
                healer.observe(eval_loss=9.0)


@pytest.mark.parametrize("cause", ["PLATEAU", "OVERFIT", "NONFINITE_LOSS"])
def test_an_alert_names_severity_diagnosis_action_and_reference(cause: str, tmp_path: Path):
    losses = [3.0 - 0.05 * step for step in range(40)]
    if cause == "PLATEAU":
        losses = [3.0] * 40
    if cause == "NONFINITE_LOSS":
        losses[30] = losses[31] = float("nan")
    tracked, contexts = Events(), []
    options = {"trackers": [tracked], "on_incident": contexts.append}
    alerted(tmp_path, losses, evaluates=cause == "OVERFIT", **options)
    mine = [each for each in events(tmp_path, "alert") if cause in each["cause"]]
    alert = mine[0]
    assert "ALERT" in alert["action"]
    assert [each["step"] - alert["step"] for each in mine] in ([0], [0, 9])
    assert alert["severity"] == ("error" if cause == "NONFINITE_LOSS" else "warning")
    assert alert["diagnosis"]
    assert alert["references"]
    assert [each for each in tracked if each["kind"] == "alert"] == mine
    assert contexts[0].failures[0].severity == alert["severity"]
    assert set(contexts[0].failures[0].references) <= {*alert["references"]}
