"""What a breaker and a new user have found; each of these once went wrong."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import numpy as np
import pytest
import torch

from healcore import policy as policies
from healcore.core.verdict import Action
from healcore.runtime.healer import Healer
from healcore.runtime.loop.exits import LastStateNotSaved, RunStopped
from healcore.runtime.loop.termination import Interrupted, TerminationWatch
from healcore.runtime.store import StateMismatch
from tests.healer.loops import Faults, loop_of, rules, train
from tests.healer.reading import events, postmortems

SKIPS = policies.loads(
    """
schema = 1
name = "skips"
[detect.nonfinite]
[[respond]]
to = ["nonfinite"]
do = ["skip", "alert"]
[incident]
quiet_steps = 20
[rollback]
probation = 4
"""
)


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_a_bad_batch_now_and_then_does_not_keep_a_run_from_saving(framework, tmp_path):
    loop = loop_of(framework, Faults(always=range(3, 60, 6)), SKIPS)
    facts = train(loop, SKIPS, range(60), store=tmp_path)
    saved = [event["step"] for event in events(tmp_path, "save")]
    assert len(saved) >= 8, "an incident is open all the time"
    assert saved[-1] == 60, "and the last state is saved all the same"
    assert facts["step"] == 60


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


def test_sigterm_in_an_incident_saves_too(tmp_path):
    from healcore.runtime.loop.termination import Terminated

    def ask(healer, number):
        if number == 24:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(Terminated):
        train(loop_of("torch", Faults(always=[23])), SKIPS, range(40), store=tmp_path, before=ask)
    assert events(tmp_path, "save")[-1]["step"] == 25


def test_sigterm_in_an_accumulation_goes_on_to_its_end(tmp_path):
    from healcore.runtime.loop.termination import Terminated

    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}

    def loop():
        with Healer(SKIPS, state=state, store=tmp_path, save_every=50) as healer:
            for number in healer.batches(range(40)):
                loss = model(torch.randn(8, 4)).square().mean()
                healer.observe(loss)
                loss.backward()
                if number == 9:
                    os.kill(os.getpid(), signal.SIGTERM)
                if number % 4 == 3:
                    optimizer.step()
                    optimizer.zero_grad()

    with pytest.raises(Terminated):
        loop()
    assert events(tmp_path, "save")[-1]["step"] == 3, "the third step ends with batch 11"


@pytest.fixture
def _ctrl_c():
    """As in a terminal: a shell's background jobs ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_ctrl_c")
def test_ctrl_c_finishes_the_step_and_saves(tmp_path, capfd):
    def press(healer, number):
        if number == 7:
            os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(Interrupted):
        train(loop_of("torch"), rules(), range(12), store=tmp_path, before=press)
    assert events(tmp_path, "save")[-1]["step"] == 8
    assert postmortems(tmp_path)[0]["ending"] == "interrupted"
    assert "Ctrl-C again" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_two_runs_at_once_share_the_signals():
    before = signal.getsignal(signal.SIGTERM)
    a, b = TerminationWatch(), TerminationWatch()
    a.start()
    b.start()
    a.stop()
    signal.raise_signal(signal.SIGTERM)
    assert (a.signal_number, b.signal_number) == (None, signal.SIGTERM)
    b.stop()
    assert signal.getsignal(signal.SIGTERM) is before


def _sleep():
    time.sleep(60)


def test_a_forked_child_dies_of_a_signal_as_ever():
    watcher = TerminationWatch()
    watcher.start()
    try:
        child = multiprocessing.get_context("fork").Process(target=_sleep)
        child.start()
        time.sleep(0.2)
        child.terminate()
        child.join(20)
        assert child.exitcode == -signal.SIGTERM
        assert watcher.signal_number is None
    finally:
        watcher.stop()


@pytest.mark.parametrize("framework", ["torch", "jax"])
def test_an_evaluation_inside_the_loop(framework, tmp_path):
    loop = loop_of(framework, Faults(always=[23]), rules())
    validation, seen = list(range(100, 103)), []
    with Healer(rules(), state=loop.state, store=tmp_path, save_every=5) as healer:
        for number in healer.batches(range(40)):
            loop.step(healer, number)
            if number % 10 == 0:
                seen += list(healer.batches(validation))
        assert healer.step == 39
        assert healer.rollbacks == 1
    assert events(tmp_path, "skipped_batches")[0]["batches"] == [[0, 23]]
    assert seen[:6] == validation * 2


def test_a_loop_that_breaks_off_begins_the_next_epoch_anew(tmp_path):
    loop, data = loop_of("torch"), list(range(10))
    with Healer(rules(), state=loop.state, store=tmp_path, save_every=5) as healer:
        for _epoch in range(3):
            for number in healer.batches(data):
                loop.step(healer, number)
                if number == 4:
                    break
        healer.after_step()
        assert healer.step == 15
    assert loop.faults.order == [0, 1, 2, 3, 4] * 3


def test_a_new_loader_for_every_epoch(tmp_path):
    def run(stop_at):
        loop = loop_of("torch")
        with Healer(rules(), state=loop.state, store=tmp_path, save_every=5) as healer:
            for epoch in range(20):
                for number in healer.batches([epoch, epoch + 100]):
                    loop.step(healer, number)
                    if healer.step == stop_at:
                        raise RuntimeError("power")
            assert len(healer.store.steps()) < 20
            assert len(healer._live.loaders.position()) < 10
        return loop.faults.order

    with pytest.raises(RuntimeError, match="power"):
        run(26)
    after = run(None)
    assert after == [n for epoch in range(12, 20) for n in (epoch, epoch + 100)][1:]


def test_a_trial_that_finds_the_same_is_not_repeated_for_ever(tmp_path):
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


def test_a_state_that_becomes_unsavable_costs_checkpoints_and_not_the_run(tmp_path):
    loop, beside = loop_of("torch"), []

    class Beside:
        def state_dict(self):
            return {"beside": list(beside)}

        def load_state_dict(self, state):
            beside[:] = state["beside"]

    def spoil(healer, number):
        if number == 12:
            beside.append(lambda: None)

    loop.state = {**loop.state, "beside": Beside()}
    with pytest.raises(LastStateNotSaved, match=r"at step 30.*checkpoint of step 10"):
        train(loop, rules(), range(30), store=tmp_path, before=spoil)
    assert "no plain form" in events(tmp_path, "save_failed")[0]["problem"]
    assert "not saved" in postmortems(tmp_path)[0]["diagnosis"]


def test_a_mask_of_minus_infinity_is_meant_and_stays_so_after_a_restart(tmp_path):
    def loop():
        made = loop_of("torch")
        made.model.register_buffer("mask", torch.full((3,), -torch.inf))
        return made

    def stumble(healer, number):
        if number == 27:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop(), rules(), range(40), store=tmp_path, before=stumble)
    assert "model.mask" in events(tmp_path, "problem")[0]["problem"]
    assert events(tmp_path, "good")
    assert train(loop(), rules(), range(40), store=tmp_path)["good"]
    assert events(tmp_path, "resume")[0]["checkpoint"] == 25


def test_a_refused_start_is_not_taken_for_a_killed_run(tmp_path):
    def stumble(healer, number):
        if number == 12:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=stumble)
    other = torch.nn.Linear(2, 2)
    state = {"model": other, "optimizer": torch.optim.AdamW(other.parameters())}
    with pytest.raises(StateMismatch):
        Healer(rules(), state=state, store=tmp_path).__enter__()
    train(loop_of("torch"), rules(), range(40), store=tmp_path)
    assert "killed" not in {each["ending"] for each in postmortems(tmp_path)}


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


def test_a_restart_whose_data_is_used_up_says_so(tmp_path):
    def stumble(healer, number):
        if healer.step == 27:
            raise RuntimeError("power")

    with pytest.raises(RuntimeError, match="power"):
        train(loop_of("torch"), rules(), range(40), store=tmp_path, before=stumble)
    train(loop_of("torch"), rules(), range(20), store=tmp_path)
    assert any("used up" in event["problem"] for event in events(tmp_path, "problem"))


def test_two_runs_in_one_directory(tmp_path):
    from healcore.runtime.store.claim import StoreInUse

    first, second = loop_of("torch"), loop_of("torch")
    with (
        Healer(rules(), state=first.state, store=tmp_path),
        pytest.raises(StoreInUse, match="another directory"),
    ):
        Healer(rules(), state=second.state, store=tmp_path).__enter__()
    assert not second.optimizer._optimizer_step_pre_hooks
    assert not list(tmp_path.glob("*.lock"))


def test_a_forked_child_does_not_end_its_parents_run(tmp_path):
    loop = loop_of("torch")
    with Healer(rules(), state=loop.state, store=tmp_path) as healer:
        child = os.fork()
        if not child:
            healer.__exit__(None, None, None)
            os._exit(0)
        os.waitpid(child, 0)
        assert events(tmp_path, "end") == []
    assert len(postmortems(tmp_path)) == 1


def test_a_model_with_a_mask_in_memory_only():
    loop = loop_of("torch", Faults(always=[23]))
    loop.model.register_buffer("mask", torch.full((3,), -torch.inf))
    assert train(loop, rules(), range(40))["rollbacks"] == 1


def test_nonfinite_ok_reaches_a_store_that_was_given(tmp_path):
    from healcore.torch.store import DCPStore

    store = DCPStore(tmp_path, nonfinite_ok=["model.a"])
    with Healer(rules(), state=loop_of("torch").state, store=store, nonfinite_ok=["model.b"]):
        assert store.nonfinite_ok == ("model.a", "model.b")
