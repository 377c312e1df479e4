"""Which actions are carried out, and when: observing policies, hooks, repeated rollbacks."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch

from healcore import Checkpoints, Healer, Hooks
from healcore import policy as policies
from healcore.core.verdict import Action
from healcore.jax import store as jax_stores
from healcore.runtime.loop.termination import IncompleteRun, LastStateNotSaved
from healcore.torch import store as torch_stores
from tests.healer.run_directory import events, events_of
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


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_run_writes_down_the_policy_with_its_values_replaced(framework, tmp_path):
    replaced = {"rollback": {"probation": 3}, "max_skips": 2}
    policy = policies.load(SKIPS, **replaced)
    loop = loop_of(framework, policy=policy)
    with Healer(SKIPS, state=loop.state, store=tmp_path, **grouped(replaced)) as healer:
        for number in healer.batches(range(4)):
            loop.step(healer, number)
    (start,) = events(tmp_path, "start")
    assert policies.loads(start["policy_toml"]) == policy
    assert start["fingerprint"] == policies.fingerprint(policy) != policies.fingerprint(SKIPS)


@BOTH
def test_hooks_receive_saves_and_rollbacks_and_the_report_is_a_plain_dict(framework, tmp_path):
    saved, rolled_back = [], []

    def broken(event):
        raise RuntimeError("a hook of the user")

    loop = loop_of(framework, Faults(always=[23]), rules())
    with Healer(
        rules(),
        state=loop.state,
        store=tmp_path,
        checkpoints=Checkpoints(every=5),
        hooks=Hooks(on_saved=[broken, saved.append], on_rollback=rolled_back.append),
    ) as healer:
        for number in healer.batches(range(40)):
            loop.step(healer, number)
        assert healer.report().ending == "running"
    (logged,) = events(tmp_path, "rollback")
    (seen,) = rolled_back
    assert seen["kind"] == "rollback"
    assert {name: seen[name] for name in ("step", "checkpoint", "onset")} == {
        name: logged[name] for name in ("step", "checkpoint", "onset")
    }
    assert [each["step"] for each in saved] == [each["step"] for each in events(tmp_path, "save")]
    problems = [each["problem"] for each in events(tmp_path, "problem")]
    assert sum("a hook of the user" in each for each in problems) == len(saved)

    report = healer.report()
    found = report.to_dict()
    assert json.loads(json.dumps(found)) == found
    assert found["ending"] == "completed"
    assert found["converged"] is True
    assert found["steps"] == 39
    assert found["attempts"] == 1
    assert found["counts"]["NONFINITE_LOSS"] == 1
    assert found["counts"]["skips"] == 1
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
@pytest.mark.parametrize("stored", ["rarely", "until step 12"])
def test_the_onset_is_the_first_step_of_the_row_with_no_checkpoint_on_probation(
    framework, stored, tmp_path, monkeypatch
):
    """Also where the newest checkpoint has long passed its probation, and no other was saved."""
    store = {"torch": torch_stores.DCPStore, "jax": jax_stores.OrbaxStore}[framework]
    write = store._write

    def fails_after_step_12(self, captured, folder):
        if healers and healers[0].step > 12:
            raise OSError(28, "No space left on device")
        return write(self, captured, folder)

    healers = []
    if stored != "rarely":
        monkeypatch.setattr(store, "_write", fails_after_step_12)
    every = 20 if stored == "rarely" else 4
    loop = loop_of(framework, Faults(always=range(33, 39)), ROWS)

    def before(healer, number):
        healers[:] = [healer]

    log = tmp_path / "events.jsonl"
    with contextlib.suppress(LastStateNotSaved):
        train(
            loop,
            ROWS,
            range(60),
            store=store(tmp_path / "run"),
            events=log,
            before=before,
            save_every=every,
        )
    (rollback,) = [event for event in events_of(log) if event["kind"] == "rollback"]
    assert rollback["onset"] == 33
    assert rollback["batches"] == [[0, number] for number in range(33, 39)]
    assert healers[0].step == 54
