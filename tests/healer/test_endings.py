"""Every way in which a run can end, and the files and the exit status that it leaves.

This file is a program too: `python -m tests.healer.test_endings FRAMEWORK FOLDER STEP` is a run
whose disk fills up at a step (0: never), and `torchrun MODULE ARGUMENT` is a worker of torchrun.
"""

import importlib
import os
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.elastic.multiprocessing.errors import record

from healcore import Healer, Keep
from healcore.errors import IncompleteRun
from healcore.policy import load
from healcore.runtime.run.ending.exits import RunStopped, Terminated
from tests import forked_programs
from tests.healer.run_directory import events, new_process, postmortems
from tests.healer.training_loops import (
    BOTH_FRAMEWORKS,
    EVERY_5,
    SKIPS,
    Faults,
    TorchLoop,
    at,
    loop_of,
    rules,
    same,
    train,
)
from tests.jax.driver.small_runs import batch, in_place
from tests.open_run import run_of
from tests.runtime.store.disk_faults import small_disk


@BOTH_FRAMEWORKS
def test_a_completed_run_saves_its_last_state_and_its_last_metrics(framework, tmp_path):
    policy = load("default", clip={"kind": "fixed", "max_norm": 1e-3})
    train(loop_of(framework, policy=policy), policy, range(12), store=tmp_path)
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["step"], found["incidents"]) == ("completed", 12, 0)
    assert events(tmp_path)[-1]["kind"] == "end"
    assert events(tmp_path, "save")[-1]["step"] == 12, "the last state is saved"
    assert found["clips"] == found["metrics"]["heal/clips"] > found["skips"] == 0
    assert found["metrics"]["heal/loss"] > 0
    assert f"clipped {found['clips']} steps" in " ".join(found["diagnosis"].split())


@BOTH_FRAMEWORKS
def test_an_exhausted_budget_stops_the_run_with_the_reason(framework, tmp_path):
    policy = rules(recoveries=1)
    loop = loop_of(framework, Faults(always=range(20, 40)), policy)
    with pytest.raises(RunStopped) as stopped:
        train(loop, policy, range(40), store=tmp_path)
    text = str(stopped.value)
    last_good = stopped.value.last_good
    for part in ("budget", "nonfinite loss", "rolled back to checkpoint", f"step {last_good}"):
        assert part in " ".join(text.split())
    (found,) = postmortems(tmp_path)
    assert (found["ending"], found["diagnosis"]) == ("stopped", text)
    assert events(tmp_path, "stop")[0]["diagnosis"] == text


@pytest.mark.parametrize("asked", [signal.SIGTERM, signal.SIGUSR1], ids=["SIGTERM", "Slurm"])
def test_sigterm_finishes_the_step_saves_and_ends_with_the_signals_status(asked, tmp_path):
    before = signal.getsignal(asked)
    ask = at(7, lambda healer: os.kill(os.getpid(), asked))
    with pytest.raises(Terminated) as ended:
        train(loop_of("torch"), rules(), range(12), store=tmp_path, before=ask)
    assert ended.value.code == 128 + asked
    assert signal.getsignal(asked) is before
    assert events(tmp_path, "save")[-1]["step"] == 8
    assert postmortems(tmp_path)[0]["ending"] == "signal"
    after = loop_of("torch")
    assert train(after, rules(), range(12), store=tmp_path).step == 12
    assert after.faults.order == [8, 9, 10, 11]


@pytest.mark.parametrize("wrapped", [False, True], ids=["itself", "wrapped"])
def test_a_run_saves_after_a_signal_although_an_abandoned_run_has_had_one(wrapped, tmp_path):
    """A notebook may leave a run open. It gets the signals too, and must not end the process.

    Lightning wraps the handler that it finds.
    """
    with suppress(IncompleteRun, Terminated), Healer(state=loop_of("torch").state):
        of_abandoned: Any = signal.getsignal(signal.SIGTERM)
        if wrapped:
            signal.signal(signal.SIGTERM, lambda number, frame: of_abandoned(number, frame))
        for name in ("first", "second"):
            ask = at(7, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
            with pytest.raises(Terminated):
                train(loop_of("torch"), rules(), range(12), store=tmp_path / name, before=ask)
        signal.signal(signal.SIGTERM, of_abandoned)
    for name in ("first", "second"):
        assert events(tmp_path / name, "save")[-1]["step"] == 8


def test_a_run_saves_after_a_signal_below_the_handler_of_an_ended_run(tmp_path):
    """Another library may put the handler of an ended run back, as Lightning does."""
    before = signal.getsignal(signal.SIGTERM)
    with suppress(IncompleteRun), Healer(state=loop_of("torch").state):
        of_ended = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, of_ended)
        ask = at(7, lambda healer: os.kill(os.getpid(), signal.SIGTERM))
        with pytest.raises(Terminated):
            train(loop_of("torch"), rules(), range(12), store=tmp_path, before=ask)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert events(tmp_path, "save")[-1]["step"] == 8


def accumulating_torch_loop(store: Path, batches: int = 10, terminated_at: int = -1) -> None:
    loop = loop_of("torch")
    with Healer(SKIPS, state=loop.state, store=store, checkpoints=EVERY_5) as healer:
        for number in healer.batches(range(batches)):
            loop.model(torch.full((1, 4), float(number))).sum().backward()
            if number == terminated_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if number % 4 == 3:
                loop.optimizer.step()
                loop.optimizer.zero_grad()


def test_a_loop_that_ends_within_an_accumulation_is_saved(tmp_path):
    accumulating_torch_loop(tmp_path)
    assert events(tmp_path, "save")[-1]["step"] == 2
    (problem,) = [each["problem"] for each in events(tmp_path, "problem")]
    assert "the run ends within an accumulation window" in problem


def ended(folder: Any) -> list[str]:
    return [each["ending"] for each in events(folder, "end")]


@BOTH_FRAMEWORKS
def test_a_run_without_a_step_is_an_error_and_the_next_start_trains(framework, tmp_path):
    loop = loop_of(framework, policy=rules())
    line = {"torch": r"optimizer\.step\(\)", "jax": r"healer\.update\(step\(healer\.state"}

    def unseen(number: int) -> None:
        """A step of torch that the Healer does not see."""
        if isinstance(loop, TorchLoop):
            loop.first.bias.data.add_(1.0)

    for _ in range(2):
        with (
            pytest.raises(IncompleteRun, match=rf"no step .*\(1,010 batches .*{line[framework]}"),
            Healer(rules(), state=loop.state, store=tmp_path) as healer,
        ):
            list(map(unseen, healer.batches(range(1010))))
    if isinstance(loop, TorchLoop):
        assert loop.first.bias.min() > 2000, "the program's own weights stay"
    assert ended(tmp_path) == ["exception"] * 2
    problems = [event["problem"] for event in events(tmp_path, "problem")]
    assert sum("1000 batches without" in problem for problem in problems) == 2
    assert train(loop, rules(), range(12), store=tmp_path).step == 12
    assert loop.faults.order == list(range(12))
    assert ended(tmp_path)[-1] == "completed"


@pytest.mark.parametrize("framework", ["torch", pytest.param("nnx", marks=pytest.mark.slow)])
def test_steps_that_the_healer_does_not_see_are_an_error(framework, tmp_path, caplog):
    """In JAX `update` is what shows a step; objects that change in place need `batches`."""
    policy = rules()
    loop: Any = loop_of("torch") if framework == "torch" else in_place(policy)
    healer = Healer(policy, state=loop.state, store=tmp_path).__enter__()
    for number in range(12):
        if framework == "torch":
            loop.step(healer, number)
        else:
            loop.step(healer.state, batch(number))
    with pytest.raises(IncompleteRun, match=r"without the Healer.*for batch in healer\.batches"):
        healer.__exit__(None, None, None)
    assert ended(tmp_path) == ["exception"]
    assert events(tmp_path, "save")[-1]["step"] > 0, "the last state is saved"
    assert "ended incomplete (the loop took its steps without the Healer)" in caplog.text
    if framework == "torch":
        new_process()
        loop = loop_of("torch")
        with Healer(policy, state=loop.state, store=tmp_path) as healer:
            assert healer.step == 0, "a start from the last state trains the same batches again"
            for number in healer.batches(range(12)):
                loop.step(healer, number)
        undisturbed = loop_of("torch")
        train(undisturbed, policy, range(12))
        assert same(loop.weights(), undisturbed.weights())


@BOTH_FRAMEWORKS
def test_a_run_that_skips_most_of_its_data_is_stopped(framework, tmp_path, capsys):
    loop = loop_of(framework, Faults(always=range(4, 20)), SKIPS)
    with pytest.raises(RunStopped, match="of 20 steps, 16 were skipped"):
        train(loop, SKIPS, range(20), store=tmp_path)
    assert ended(tmp_path) == ["stopped"]
    assert "the newest one before the trouble" in capsys.readouterr().err
    new_process()
    with pytest.raises(RunStopped):  # and not "nothing to do" with status 0
        train(loop, SKIPS, range(20), store=tmp_path)
    new_process()
    mended = loop_of(framework, policy=SKIPS)
    train(mended, SKIPS, range(20), store=tmp_path)
    undisturbed = loop_of(framework, policy=SKIPS)
    train(undisturbed, SKIPS, range(20))
    assert same(mended.weights(), undisturbed.weights())


def loop_and_export(store: Path, kind: str, steps: int, exported: list[int]) -> None:
    """A program that uses its weights after the loop. Its labels are NaN from step 40 on."""
    loop = loop_of("torch", Faults(always=range(40, 200)))
    with Healer("default", state=loop.state, store=store) as healer:
        if kind == "batches":
            for number in healer.batches(range(steps)):
                loop.step(healer, number)
        elif kind == "epochs":
            for epoch in healer.epochs(2):
                for number in healer.batches(range(steps // 2), epoch=epoch):
                    loop.step(healer, number + epoch * steps // 2)
        else:
            for number in healer.steps(steps):
                loop.step(healer, number)
        exported.append(healer.step)


@pytest.mark.parametrize(
    ("kind", "steps"), [("batches", 120), ("epochs", 120), ("epochs", 90), ("steps", 90)]
)
def test_the_judgement_of_the_run_comes_before_the_code_after_its_loop(kind, steps, tmp_path):
    exported: list[int] = []
    with pytest.raises(RunStopped, match="has not trained on most of them"):
        loop_and_export(tmp_path, kind, steps, exported)
    assert exported == []
    newest = max(each.name for each in tmp_path.glob("step-*"))
    assert newest.startswith(f"step-{steps:010d}."), "the last state, as the page promises"
    new_process()
    with pytest.raises(RunStopped):  # begins before the skipped steps, and not at the last state
        loop_and_export(tmp_path, kind, steps, exported)
    assert events(tmp_path, "resume")[-1]["step"] < 40


def test_an_evaluation_and_a_first_epoch_are_not_the_end_of_the_data(tmp_path):
    loop = loop_of("torch", Faults(always=range(10)))
    with Healer(SKIPS, state=loop.state, store=tmp_path) as healer:
        for epoch in range(3):
            for number in healer.batches(range(10), epoch=epoch):
                loop.step(healer, number + 10 * epoch)
            for _ in healer.batches(range(3)):
                pass
    assert healer.step == 30


PROGRAM = "tests.healer.test_endings"


def nothing_is_trained(run: Path, *program: object) -> str:
    """Starts a completed run again, and returns what it prints after its loop."""
    files = [*run.glob("step-*/**/*"), *run.glob("*postmortem*")]
    files = sorted(each for each in files if each.is_file())
    contents = [each.read_bytes() for each in files]
    again = forked_programs.run("-m", *program)
    assert again.returncode == 0, again.stderr
    assert "Traceback" not in again.stderr
    (line,) = (line for line in again.stderr.splitlines() if line.startswith("healcore: "))
    assert "healcore: this run has completed at step" in line
    assert "resume=True" in line
    assert [each.read_bytes() for each in files] == contents, "and no checkpoint was touched"
    return again.stdout


@pytest.mark.slow
def test_a_completed_run_ends_as_before_in_a_worker_of_torchrun(tmp_path):
    first = forked_programs.run("-m", "examples.torch_healer", tmp_path)
    assert first.returncode == 0, first.stderr
    again = nothing_is_trained(tmp_path, PROGRAM, "torchrun", "examples.torch_healer", tmp_path)
    # The program prints the loss of its last iteration, and there was none.
    assert again.partition(",")[2] == first.stdout.partition(",")[2] != ""


@pytest.mark.slow
@BOTH_FRAMEWORKS
def test_a_disk_that_is_full_at_the_end_is_no_completed_run(framework, tmp_path):
    with small_disk(tmp_path / "disk", 16) as disk:
        full = forked_programs.run("-m", PROGRAM, framework, disk, 29)
        assert full.returncode == 1, full.stderr
        assert full.stdout == ""
        # Not always the last line: Orbax's thread prints a traceback of its own.
        assert "\nhealcore: the loop has ended at step 30, and its last state is not" in full.stderr
        (disk / "filler").unlink()
        again = forked_programs.run("-m", PROGRAM, framework, disk, 0)
        assert again.returncode == 0, again.stderr
        assert "healcore: resumes from the checkpoint of step" in again.stderr
        assert again.stdout == "trained to 30\n"
        endings = [found["ending"] for found in postmortems(disk / "run")]
        assert endings[-1] == "completed"
        assert nothing_is_trained(disk / "run", PROGRAM, framework, disk, 0) == again.stdout


def trains(framework: str, folder: Path, full_at: int) -> None:
    policy = rules()
    file = folder / "filler"
    keep = Keep(good=50, candidates=50)  # nothing is deleted, which would make room

    def fill(healer: Any) -> None:
        run_of(healer).store.wait()  # a save that fails would free its part of the disk
        with suppress(OSError), file.open("wb", buffering=0) as disk:
            while True:
                disk.write(bytes(4096))
        # Enough stays free for a record, and not for a checkpoint.
        os.truncate(file, max(0, file.stat().st_size - 8192))

    options: Any = {"store": folder / "run", "keep": keep, "save_every": None}
    options["before"] = at(full_at or -1, fill)
    loop = loop_of(framework, policy=policy)
    print("trained to", train(loop, policy, list(range(30)), **options).step)


if __name__ == "__main__":
    if sys.argv[1] == "torchrun":
        record(importlib.import_module(sys.argv[2]).main)(sys.argv[3])
    else:
        trains(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
