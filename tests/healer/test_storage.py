"""Disk faults during a run, and unexpected files in its directory."""

from __future__ import annotations

import pytest
import torch

from healcore.runtime.healer import Healer
from healcore.runtime.loop.start import AlreadyCompleted, StoreNotEmpty
from healcore.runtime.loop.termination import LastStateNotSaved
from healcore.runtime.store import StateMismatch, StoreInUse
from healcore.torch.store import DCPStore
from tests.healer.run_directory import events, new_process, postmortems
from tests.healer.training_loops import Faults, broken_at, loop_of, rules, train


def test_a_disk_that_fails_costs_a_checkpoint_and_not_the_run(tmp_path, monkeypatch):
    write, full = DCPStore._write, []

    def fails(self, captured, folder):
        if full == [True]:
            raise OSError(28, "No space left on device")
        return write(self, captured, folder)

    def fill(healer, number):
        full[:] = [18 <= number < 28]

    monkeypatch.setattr(DCPStore, "_write", fails)
    loop = loop_of("torch", Faults(always=[30]))
    assert train(loop, rules(), range(40), store=tmp_path, before=fill)["step"] == 39
    failed = events(tmp_path, "save_failed")
    assert failed[0]["step"] in (15, 20), "a slow disk may still be at the one before"
    assert "No space left" in failed[0]["problem"]


def test_an_edited_policy_does_not_make_checkpoints_useless(tmp_path):
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=broken_at(12))
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
    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=broken_at(12))
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


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_completed_store_is_of_one_run(framework, tmp_path):
    """The store does not give its weights to another run."""

    def run(seed: int) -> None:
        loop = loop_of(framework, policy=rules())
        if framework == "torch":
            torch.manual_seed(seed)
            for each in loop.model.parameters():
                torch.nn.init.normal_(each)
        else:
            params = {name: each + seed for name, each in loop.state["params"].items()}
            loop.state = {**loop.state, "params": params}
        train(loop, rules(), range(12), store=tmp_path)

    run(0)
    for seed in (1, 0):  # a fold, and the same run again
        with pytest.raises(StoreNotEmpty, match=r"this process has completed.*runs/{fold}"):
            run(seed)
    new_process()
    with pytest.raises(StoreNotEmpty, match="began with other weights than this program"):
        run(1)
    with pytest.raises(AlreadyCompleted):
        run(0)


def test_two_runs_do_not_share_a_directory(tmp_path):
    def open_again(healer, number):
        with pytest.raises(StoreInUse, match="this process"):
            Healer(rules(), state=loop_of("torch").state, store=tmp_path).__enter__()

    train(loop_of("torch"), rules(), range(2), store=tmp_path, before=open_again)
