"""Every way in which a run can end, and the files it leaves."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
import torch

from healcore import Checkpoints, Healer
from healcore.jax import protect
from healcore.runtime.loop import termination
from healcore.runtime.loop.termination import EndRequested, RunStopped, Terminated
from tests import forked_programs
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, train

BOTH = pytest.mark.parametrize("framework", ["torch", "jax"])


@BOTH
def test_completed(framework, tmp_path):
    train(loop_of(framework, policy=rules()), rules(), range(12), store=tmp_path)
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["step"], found["incidents"]) == ("completed", 12, 0)
    assert events(tmp_path)[-1]["kind"] == "end"
    assert events(tmp_path, "save")[-1]["step"] == 12, "the last state is saved"


def test_the_postmortem_has_the_last_metrics_and_the_clips(tmp_path):
    clip = {"kind": "fixed", "max_norm": 1e-3}
    train(loop_of("torch"), "default", range(12), store=tmp_path, clip=clip)
    (found,) = postmortems(tmp_path)
    assert found["clips"] == found["metrics"]["heal/clips"] > found["skips"] == 0
    assert found["metrics"]["heal/loss"] > 0
    assert f"clipped {found['clips']} steps" in " ".join(found["diagnosis"].split())


@BOTH
def test_an_exhausted_budget_stops_the_run_with_the_reason(framework, tmp_path):
    policy = rules(recoveries=1)
    loop = loop_of(framework, Faults(always=range(20, 40)), policy)
    with pytest.raises(RunStopped) as stopped:
        train(loop, policy, range(40), store=tmp_path)
    text = str(stopped.value)
    for part in ("budget", "nonfinite_loss", "rolled back from step"):
        assert part in text
    assert f"checkpoint of step {stopped.value.last_good}" in text
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["diagnosis"]) == ("stopped", text)
    assert events(tmp_path, "stop")[0]["diagnosis"] == text


@BOTH
def test_a_stop_file_ends_the_run_with_its_save_and_no_run_starts_while_it_is_there(
    framework, tmp_path, monkeypatch, caplog
):
    monkeypatch.setattr(termination, "POLL_INTERVAL_S", 0.01)
    store, path = tmp_path / "store", tmp_path / "STOP"

    def ask(healer, number):
        if number == 7:
            path.touch()
            while not healer._loop.ranks.stop_file.found:
                time.sleep(0.01)

    loop = loop_of(framework, policy=rules())
    with pytest.raises(EndRequested) as ended:
        train(loop, rules(), range(12), store=store, before=ask, stop_file=path)
    assert ended.value.code == 0
    (found,) = postmortems(store)
    assert (found["ending"], found["step"], found["exception"]) == ("requested", 8, None)
    assert str(path) in found["diagnosis"]
    assert events(store, "save")[-1]["step"] == 8
    with pytest.raises(EndRequested), caplog.at_level("INFO", "healcore"):
        train(loop_of(framework, policy=rules()), rules(), range(12), store=store, stop_file=path)
    assert f"the stop file {path} exists" in caplog.text
    path.unlink()
    train(loop_of(framework, policy=rules()), rules(), range(12), store=store, stop_file=path)
    assert events(store, "end")[-1]["ending"] == "completed"


def test_an_uncaught_stop_is_a_failed_process_with_the_diagnosis_on_its_screen(tmp_path):
    done = forked_programs.run("-m", "tests.healer.killed_runs", "stopped")
    assert done.returncode == 1
    assert done.stdout == ""
    assert "healcore stopped the run at step" in done.stderr
    assert "Traceback" not in done.stderr


def test_an_exception_of_the_loop_comes_through(tmp_path):
    def fail(healer, number):
        if number == 7:
            raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        train(loop_of("torch"), rules(), range(12), store=tmp_path, before=fail)
    (found,) = postmortems(tmp_path)
    assert found["ending"] == "exception"
    assert "ZeroDivisionError: mine" in found["exception"]
    # The step may have been half done: what is in memory now is not saved.
    assert events(tmp_path, "save")[-1]["step"] == 5


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "Slurm"])
def test_sigterm_finishes_the_step_saves_and_ends_with_the_signals_status(asked, tmp_path):
    before = signal.getsignal(asked)

    def ask(healer, number):
        if number == 7:
            os.kill(os.getpid(), asked)

    with pytest.raises(Terminated) as ended:
        train(loop_of("torch"), rules(), range(12), store=tmp_path, before=ask)
    assert ended.value.code == 128 + asked
    assert signal.getsignal(asked) is before
    assert events(tmp_path, "save")[-1]["step"] == 8
    assert postmortems(tmp_path)[0]["ending"] == "signal"
    after = loop_of("torch")
    assert train(after, rules(), range(12), store=tmp_path)["step"] == 12
    assert after.faults.order == [8, 9, 10, 11]


def accumulating_torch_loop(store: Path, batches: int = 10, terminated_at: int = -1) -> None:
    loop = loop_of("torch")
    with Healer(SKIPS, state=loop.state, store=store, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(range(batches)):
            loop.model(torch.full((1, 4), float(number))).sum().backward()
            if number == terminated_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if number % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()


def accumulating_jax_loop(store: Path) -> None:
    params = {"w": jnp.ones(2)}
    tx = protect(optax.MultiSteps(optax.sgd(0.1), 4).gradient_transformation(), SKIPS)
    state = {"params": params, "opt_state": tx.init(params)}

    @jax.jit
    def step(state, number):
        grads = {"w": jnp.full(2, number)}
        updates, opt_state = tx.update(grads, state["opt_state"], state["params"], value=number)
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}

    with Healer(SKIPS, state=state, store=store, checkpoints=Checkpoints(every=5)) as healer:
        for number in healer.batches(range(10)):
            healer.update(step(healer.state, float(number)))


@pytest.mark.parametrize(
    ("loop", "steps"), [(accumulating_torch_loop, 2), (accumulating_jax_loop, 10)]
)
def test_a_loop_that_ends_within_an_accumulation_is_saved(loop, steps, tmp_path):
    loop(tmp_path)
    assert events(tmp_path, "save")[-1]["step"] == steps
    (problem,) = [each["problem"] for each in events(tmp_path, "problem")]
    assert "the run ends within an accumulation window" in problem


@BOTH
def test_what_the_last_step_orders_is_done_although_a_signal_ends_the_run(framework, tmp_path):
    """The step is read one step later: without that, the next start goes on from after it."""

    def terminate(healer, number):
        if number == 9:
            os.kill(os.getpid(), signal.SIGTERM)

    loop = loop_of(framework, Faults(always=[9]), rules())
    with pytest.raises(Terminated):
        train(loop, rules(), range(20), store=tmp_path, before=terminate, save_every=4)
    (back,) = events(tmp_path, "rollback")
    assert (back["onset"], back["checkpoint"]) == (9, 4)
    after = loop_of(framework, Faults(always=[9]), rules())
    assert train(after, rules(), range(20), store=tmp_path, save_every=4)["step"] == 19
    assert 9 not in after.faults.order
