"""Which actions are carried out, and when: observing policies, hooks, lag, repeated rollbacks."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from healcore import policy as policies
from healcore.core.verdict import Action
from healcore.runtime.healer import Healer
from healcore.runtime.loop.termination import (
    IncompleteRun,
    RunStopped,
)
from tests.healer.run_directory import events
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


@BOTH
@pytest.mark.parametrize("lag", [0, 1, 3])
def test_the_same_with_any_lag(framework, lag, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), rules())
    facts = train(loop, rules(), range(40), store=tmp_path, lag=lag)
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["step"] == min(24 + lag, 25)  # a save reads what is on its way
    assert rollback["onset"] == 23
    assert rollback["batches"] == [[0, 23]]
    assert facts["step"] == 39
    assert all(np.isfinite(each).all() for each in loop.weights())


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
    assert seen[0].facts.last_good is not None
    assert events(tmp_path, "hook")[0]["action"] == []


def test_a_hook_that_raises_is_contained(tmp_path):
    def hook(incident):
        raise KeyError("mine")

    loop = loop_of("torch", Faults(always=[23]))
    facts = train(loop, rules(), range(40), store=tmp_path, on_incident=[hook])
    assert facts["rollbacks"] == 1
    assert "mine" in events(tmp_path, "hook")[0]["problem"]


def test_a_hook_may_stop_the_run(tmp_path):
    loop = loop_of("torch", Faults(always=[23]))
    with pytest.raises(RunStopped, match="hook"):
        train(loop, rules(), range(40), store=tmp_path, on_incident=lambda i: Action.STOP)


def test_two_optimizers_are_one_run(tmp_path):
    import torch

    torch.manual_seed(0)
    models = [torch.nn.Linear(4, 1), torch.nn.Linear(4, 1)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=1e-2) for model in models]
    state = {"a": models[0], "b": models[1], "opt_a": optimizers[0], "opt_b": optimizers[1]}
    faults = Faults(always=[23])
    with Healer(rules(), state=state, store=tmp_path, save_every=5) as healer:
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


def test_a_loop_that_never_steps_is_reported(tmp_path):
    loop = loop_of("jax", policy=rules())
    healer = Healer(rules(), state=loop.state, store=tmp_path).__enter__()
    for number in healer.batches(range(150)):
        loop.step(None, number)  # the Healer never hears of it
    with pytest.raises(IncompleteRun, match=r"healer\.update"):
        healer.__exit__(None, None, None)
    assert any("healer.update" in event["problem"] for event in events(tmp_path, "problem"))


def test_used_where_it_cannot_be():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with pytest.raises(IncompleteRun), healer, pytest.raises(RuntimeError, match="other framework"):
        healer.update(None)
    with pytest.raises(RuntimeError, match="over"):
        next(healer.batches([1]))
    assert healer.step == 0
    with pytest.raises(RuntimeError, match="one `with`"), healer:
        pass
    with pytest.raises(ValueError, match="lag"):
        Healer(rules(), state=loop.state, lag=-1)
    with pytest.raises(ValueError, match="save_every"):
        Healer(rules(), state=loop.state, save_every=0)
    with pytest.raises((TypeError, ValueError), match=r"nothing of torch|no healing state"):
        Healer(rules(), state={}).__enter__()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_run_writes_down_the_policy_with_its_values_replaced(framework, tmp_path):
    replaced = {"rollback": {"probation": 3}, "max_skips": 2}
    policy = policies.load(SKIPS, **replaced)
    loop = loop_of(framework, policy=policy)
    with Healer(SKIPS, state=loop.state, store=tmp_path, framework=framework, **replaced) as healer:
        for number in healer.batches(range(4)):
            loop.step(healer, number)
    (start,) = events(tmp_path, "start")
    assert policies.loads(start["policy_toml"]) == policy
    assert start["fingerprint"] == policies.fingerprint(policy) != policies.fingerprint(SKIPS)


def test_a_rerun_with_the_same_fault_is_not_repeated_for_ever(tmp_path):
    text = policies.dumps(rules()).replace("region = 30", "region = 0")
    policy = policies.loads(text)
    loop = loop_of("torch", Faults(always=[23]))
    facts = train(loop, policy, range(40), store=tmp_path, rerun=True)
    assert facts["rollbacks"] == 2
    assert facts["step"] == 39


def test_hooks_cannot_send_a_run_back_for_ever():
    loop = loop_of("torch", Faults(always=range(10, 2000, 5)))

    class Endless:
        def __iter__(self):
            yield from range(3000)

    with pytest.raises(RunStopped, match="3 rollbacks were needed"):
        train(loop, SKIPS, Endless(), on_incident=lambda incident: Action.ROLLBACK)
    assert len(loop.faults.order) < 300


def test_a_rollback_that_does_not_fit_stops_with_a_diagnosis(tmp_path):
    loop = loop_of("torch", Faults(always=[23]))

    def grow(healer, number):
        if number == 22:
            loop.optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(3))]})

    with pytest.raises(RunStopped, match="does not fit"):
        train(loop, rules(), range(40), store=tmp_path, before=grow)
    facts = train(loop_of("torch", Faults(always=[23])), rules(), range(40), store=tmp_path)
    assert facts["step"] == 39, "the next start is not held up by the plan"


def test_the_window_begins_with_the_trouble_that_was_ordered_for(tmp_path):
    """An older incident that is still open does not drag innocent batches into the window."""
    policy = policies.loads(
        policies.dumps(rules())
        .replace('to = ["nonfinite"]', 'to = ["nonfinite_loss"]')
        .replace("quiet_steps = 2", "quiet_steps = 15")
        + '\n[[respond]]\nto = ["grad_spike"]\ndo = ["skip", "alert"]\n[detect.grad_spike]\n'
    )
    loop = loop_of("torch", Faults(always=[60]))
    batch = loop.faults.batch

    def spiky(number):
        inputs, targets = batch(number)
        return inputs, targets * np.float32(1e4 if number == 50 else 1)

    loop.faults.batch = spiky
    train(loop, policy, range(80), store=tmp_path)
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["onset"] == 50
    assert rollback["batches"] == [[0, 60]]


def test_a_hook_may_order_a_save(tmp_path):
    loop = loop_of("torch", Faults(always=[23]))
    train(loop, rules(), range(40), store=tmp_path, on_incident=lambda incident: Action.SAVE)
    assert [e["step"] for e in events(tmp_path, "save") if e["why"] == "ordered"] == [25]
