"""Ctrl-C, as a shell and a scheduler see it: real processes, real signals."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from healcore import Checkpoints
from healcore.runtime.healer import Healer
from healcore.runtime.loop.termination import Interrupted, TerminationWatch
from tests import forked_programs
from tests.forked_programs import ForkedProgram
from tests.healer.run_directory import events, postmortems
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, train


@contextmanager
def started(folder: Path, how: str = "") -> Iterator[subprocess.Popen[str]]:
    """The program, waiting in its step 7."""
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    process = ForkedProgram("-m", "tests.runtime.loop.interrupted_run", folder, how, **pipes)
    assert process.stdout is not None
    assert any(line == "7\n" for line in process.stdout), process.stderr and process.stderr.read()
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def interrupt(process: subprocess.Popen[str]) -> None:
    """Ctrl-C, and waits until the program has taken note."""
    assert process.stderr is not None
    process.send_signal(signal.SIGINT)
    assert any("Ctrl-C again stops at once" in line for line in process.stderr)


@pytest.mark.parametrize("how", ["", "caught"])
def test_the_first_one_saves_and_ends_with_130_and_a_plain_line(how, tmp_path):
    with started(tmp_path, how) as process:
        interrupt(process)
        out, err = process.communicate("\n" * 5, timeout=600)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert "interrupted after step 8: no intervention; checkpoint 8 is on disk" in err
    assert out.split("\n")[:-1] == ["caught", "tidied up"][how == "" :]
    assert postmortems(tmp_path)[0]["ending"] == "interrupted"
    loop = loop_of("torch")
    assert train(loop, rules(), range(12), store=tmp_path)["step"] == 12
    assert loop.faults.order == [8, 9, 10, 11]


@pytest.mark.parametrize("how", ["", "disk hangs"])
def test_the_second_one_stops_at_once(how, tmp_path):
    """In the middle of a step, with a save under way that would never end."""
    with started(tmp_path, how) as process:
        interrupt(process)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT, "which a shell shows as 130"
    assert "Traceback" not in err
    assert not events(tmp_path, "end")
    expected = 0 if how else 5
    loop = loop_of("torch")
    train(loop, rules(), range(12), store=tmp_path)
    assert loop.faults.order[0] == expected


def test_a_second_one_while_the_run_is_being_saved(tmp_path):
    with started(tmp_path, "disk hangs") as process:
        interrupt(process)
        assert process.stdin is not None
        process.stdin.write("\n" * 5)
        process.stdin.close()
        process.stdin = None
        with pytest.raises(subprocess.TimeoutExpired):  # it waits for its disk
            process.communicate(timeout=3)
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=600)
    assert process.returncode == -signal.SIGINT


def test_in_a_notebook_the_second_one_leaves_the_kernel_alive(tmp_path):
    done = forked_programs.run("-m", "tests.runtime.loop.interrupted_twice", tmp_path)
    assert (done.returncode, done.stdout) == (0, "alive\n"), done.stderr


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
        with Healer(
            SKIPS, state=state, store=tmp_path, checkpoints=Checkpoints(every=50)
        ) as healer:
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


def _own_run():
    watcher = TerminationWatch()
    watcher.start()
    os.kill(os.getpid(), signal.SIGTERM)
    raise SystemExit(0 if watcher.signal_number == signal.SIGTERM else 1)


def test_a_run_of_a_forked_child_takes_the_signal():
    """It inherits the handlers of the parent's run."""
    watcher = TerminationWatch()
    watcher.start()
    try:
        child = multiprocessing.get_context("fork").Process(target=_own_run)
        child.start()
        child.join(20)
        assert child.exitcode == 0
        assert watcher.signal_number is None
    finally:
        watcher.stop()


def test_one_of_several_ranks_waits_for_its_data_and_ends_with_the_others():
    """The ranks vote two steps after the signal."""
    proposed: list[int] = []
    watch = TerminationWatch(proposed.append)
    watch.start()
    try:
        os.kill(os.getpid(), signal.SIGTERM)
        with watch.waiting_for_data():
            watch.sleep(0.01)  # before a read that is repeated
        assert proposed == [signal.SIGTERM]
    finally:
        watch.stop()
