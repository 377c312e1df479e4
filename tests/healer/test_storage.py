"""Disk faults during a run, and unexpected files in its directory."""

from __future__ import annotations

import pytest
import torch

from healcore.runtime.healer import Healer
from healcore.runtime.loop.setup import AlreadyCompleted, StoreNotEmpty
from healcore.runtime.loop.termination import (
    IncompleteRun,
    LastStateNotSaved,
)
from healcore.runtime.store import StateMismatch
from tests.healer.run_directory import events, flip_a_bit, new_process, postmortems
from tests.healer.training_loops import Faults, loop_of, rules, same, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_a_damaged_checkpoint_is_reported_and_the_next_older_one_used(framework, tmp_path):
    policy = rules()

    def stumble(healer, number):
        if number == 27:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of(framework, policy=policy), policy, range(40), store=tmp_path, before=stumble)
    flip_a_bit(next(tmp_path.glob("step-0000000025.*")), seed=1)
    clean = loop_of(framework, policy=policy)
    train(clean, policy, range(40))
    loop = loop_of(framework, policy=policy)
    facts = train(loop, policy, range(40), store=tmp_path)
    assert facts["step"] == 40
    assert loop.faults.order[0] == 20
    assert events(tmp_path, "damaged")[0]["step"] == 25
    assert events(tmp_path, "resume")[0]["checkpoint"] == 20
    assert same(loop.weights(), clean.weights())


def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    from healcore.torch.store import DCPStore

    write = DCPStore._write

    def full(self, captured, folder):
        if full.on:
            raise OSError(28, "No space left on device")
        return write(self, captured, folder)

    full.on = False
    monkeypatch.setattr(DCPStore, "_write", full)

    def fill(healer, number):
        full.on = 18 <= number < 28

    loop = loop_of("torch", Faults(always=[30]))
    facts = train(loop, rules(), range(40), store=tmp_path, before=fill)
    assert facts["step"] == 39
    failed = events(tmp_path, "save_failed")
    assert failed[0]["step"] in (15, 20), "a slow disk may still be at the one before"
    assert "No space left" in failed[0]["problem"]


def test_old_checkpoints_without_healing_state(tmp_path):
    from healcore.torch.store import DCPStore

    old = loop_of("torch")
    for number in range(20):
        old.step(None, number)
    store = DCPStore(tmp_path)
    store.save(20, old.state)
    store.wait()
    loop = loop_of("torch", Faults(always=[30]))
    facts = train(loop, rules(), range(40), store=tmp_path)
    assert events(tmp_path, "resume")[0]["checkpoint"] == 20
    assert facts["rollbacks"] == 1
    assert events(tmp_path, "rollback")[0]["onset"] >= 20


def test_an_edited_policy_does_not_make_checkpoints_useless(tmp_path):
    def stumble(healer, number):
        if number == 12:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=stumble)
    facts = train(loop_of("torch"), "default", range(40), store=tmp_path)
    assert facts["step"] == 40
    assert any("restart their warm-up" in event["problem"] for event in events(tmp_path, "problem"))


def test_the_values_of_resume(tmp_path):
    train(loop_of("torch"), rules(), range(12), store=tmp_path)
    new_process()
    with pytest.raises(AlreadyCompleted, match="completed at step 12; resume=True"):
        train(loop_of("torch"), rules(), range(12), store=tmp_path)
    with pytest.raises(StoreNotEmpty, match="up to step 12"):
        train(loop_of("torch"), rules(), range(12), store=tmp_path, resume=False)
    facts = train(loop_of("torch"), rules(), range(12), epochs=2, store=tmp_path, resume=True)
    assert facts["step"] == 24


def test_another_model_is_refused_before_anything_is_touched(tmp_path):

    def stumble(healer, number):
        if number == 12:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=stumble)
    model = torch.nn.Linear(3, 3)
    before = model.weight.detach().clone()
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with pytest.raises(StateMismatch), Healer(rules(), state=state, store=tmp_path) as healer:
        del healer
    assert torch.equal(model.weight, before)
    assert not optimizer._optimizer_step_pre_hooks, "no hook of healcore is left on it"


def test_a_state_that_becomes_unsavable_costs_checkpoints_and_not_the_run(tmp_path):
    loop, extra = loop_of("torch"), []

    class Extra:
        def state_dict(self):
            return {"extra": list(extra)}

        def load_state_dict(self, state):
            extra[:] = state["extra"]

    def spoil(healer, number):
        if number == 12:
            extra.append(lambda: None)

    loop.state = {**loop.state, "extra": Extra()}
    with pytest.raises(LastStateNotSaved, match=r"at step 30.*checkpoint of step 10"):
        train(loop, rules(), range(30), store=tmp_path, before=spoil)
    assert "no plain form" in events(tmp_path, "save_failed")[0]["problem"]
    assert "not saved" in postmortems(tmp_path)[0]["diagnosis"]


def test_two_runs_in_one_directory(tmp_path):
    from healcore.runtime.store.claim import StoreInUse

    first, second = loop_of("torch"), loop_of("torch")
    with (
        pytest.raises(IncompleteRun),
        Healer(rules(), state=first.state, store=tmp_path),
        pytest.raises(StoreInUse, match="another directory"),
    ):
        Healer(rules(), state=second.state, store=tmp_path).__enter__()
    assert not second.optimizer._optimizer_step_pre_hooks
