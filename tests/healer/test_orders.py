"""Observing, hooks, lag: who has a say in what is done, and when."""

from __future__ import annotations

import numpy as np
import pytest

from healcore.core.verdict import Action
from healcore.runtime.healer import Healer
from healcore.runtime.loop.termination import RunStopped
from tests.healer.loops import Faults, loop_of, rules, same, train
from tests.healer.reading import events

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_observe_changes_nothing_and_tells_the_same(framework, tmp_path):
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
    assert orders, "what would have been done is told"
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


def test_a_loop_that_never_steps_is_told(tmp_path):
    loop = loop_of("jax", policy=rules())
    with Healer(rules(), state=loop.state, store=tmp_path) as healer:
        for number in healer.batches(range(150)):
            loop.step(None, number)  # the Healer never hears of it
    assert any("healer.update" in event["problem"] for event in events(tmp_path, "problem"))


def test_used_where_it_cannot_be():
    loop = loop_of("torch")
    healer = Healer(rules(), state=loop.state)
    with pytest.raises(RuntimeError, match="with Healer"):
        healer.observe(1.0)
    with healer, pytest.raises(RuntimeError, match="other framework"):
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
