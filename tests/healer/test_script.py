"""`healcore.start`: a run without a block, closed by the end of the process."""

import code
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import healcore
from tests import forked_programs
from tests.healer.run_directory import events, new_process
from tests.open_run import run_of

PROGRAM = """
import sys, torch, healcore
folder, at, what = sys.argv[1], int(sys.argv[2]), sys.argv[3]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
every = healcore.Checkpoints(every=5)
healer = healcore.start(
    state={"model": model, "optimizer": optimizer}, store=folder, checkpoints=every
)
for number in healer.batches(range(30)) if what != "no step" else ():
    if number == at and what == "break":
        break
    if number == at:
        exec(what)
    loss = (model(torch.full((4, 2), number / 10.0)) - 1).square().mean()
    healer.observe(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
if what == "close":
    healer.close()
    healer.close()
print("after the loop", healer.step, model.weight.flatten().tolist())
"""


def run(folder: Path, at: int = -1, what: str = "pass") -> tuple[int, str, str]:
    done = forked_programs.run("-c", PROGRAM, folder, at, what)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_script_that_ends_is_a_completed_run(tmp_path):
    status, out, lines = run(tmp_path)
    assert (status, out[:17]) == (0, "after the loop 30"), lines
    assert "completed after step 30" in lines
    status, again, lines = run(tmp_path)
    assert (status, again) == (0, out)
    assert "this run has completed at step 30" in lines


@pytest.mark.parametrize(
    ("what", "status", "line"),
    [
        ("raise ValueError('wrong')", 1, "ended by an exception after step 17"),
        ("sys.exit(3)", 3, "a program that has left its loop early"),
        ("raise KeyboardInterrupt", 130, "after step 17"),
        ("break", 0, "a program that has left its loop early"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", 143, "ended by a signal"),
    ],
)
def test_a_script_that_ends_early_is_resumed_with_the_same_bits(what, status, line, tmp_path):
    _, whole, _ = run(tmp_path / "whole")
    ended, _, lines = run(tmp_path / "broken", 17, what)
    assert abs(ended) in (status, 2), lines
    assert line in lines
    if "ValueError" in what:
        assert lines.index(line) < lines.rindex("ValueError: wrong\n"), "as with a block"
    status, out, lines = run(tmp_path / "broken")
    assert (status, out) == (0, whole)
    assert "resumes from the checkpoint of step 1" in lines


def test_a_script_without_a_step_ends_with_status_1(tmp_path):
    status, out, lines = run(tmp_path, what="no step")
    assert status == 1
    assert out.startswith("after the loop 0"), "the program itself has run"
    assert "the Healer has seen no step of an optimizer" in lines


@pytest.mark.parametrize("what", ["raise ValueError('wrong')", "sys.exit(3)", "break"])
def test_a_loop_in_a_variable_of_the_module_ends_without_a_line_of_its_own(what, tmp_path):
    """Python closes its generator last, when the modules of healcore have lost their names."""
    loop = 'for number in healer.batches(range(30)) if what != "no step" else ():'
    program = PROGRAM.replace(loop, "batches = healer.batches(range(30))\nfor number in batches:")
    assert program != PROGRAM
    # A process of its own: a forked one ends before its modules are cleared.
    command = [sys.executable, "-c", program, str(tmp_path), "5", what]
    lines = subprocess.run(command, capture_output=True, text=True).stderr
    assert "after step 5" in lines
    assert "Exception ignored" not in lines


@pytest.mark.slow
def test_close_ends_the_run_before_the_program(tmp_path):
    status, out, lines = run(tmp_path, what="close")
    assert (status, out[:17]) == (0, "after the loop 30"), lines
    assert lines.count("completed after step 30") == 1


def test_a_cell_that_raises_leaves_the_run_open(tmp_path, monkeypatch, capsys):
    """In a notebook the next cell goes on, and a new `start` for the store closes the old run."""
    monkeypatch.setattr(sys, "ps1", "In: ", raising=False)
    torch.manual_seed(0)
    session = code.InteractiveConsole({"healcore": healcore, "torch": torch, "folder": tmp_path})

    def cell(text: str) -> None:
        session.runcode(compile(text, "cell", "exec"))

    begin = """
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
state = {"model": model, "optimizer": optimizer}
healer = healcore.start(state=state, store=folder)
"""
    loop = """
for number in healer.batches(range(20)):
    if number == STOP:
        raise ValueError("a typing error in the cell")
    loss = model(torch.ones(4, 2)).square().mean()
    healer.observe(loss)
    loss.backward(); optimizer.step(); optimizer.zero_grad()
"""
    cell(begin + "STOP = 7" + loop)
    first = session.locals["healer"]
    assert (first.is_open, first.step) == (True, 7)
    new_process()
    cell(begin + "STOP = -1" + loop)
    second = session.locals["healer"]
    assert not first.is_open
    assert (second.is_open, second.step) == (True, 20)
    cell("healer.close()")
    assert not second.is_open
    assert [each["ending"] for each in events(tmp_path, "end")] == ["requested", "completed"]
    lines = capsys.readouterr().err
    assert "resumes from the checkpoint of step 7" in lines, lines


@pytest.mark.parametrize("loop", ["steps", "epochs"])
def test_a_break_in_a_final_evaluation_is_no_early_end(loop, tmp_path):
    """The evaluation only reads, after the loop that trains has ended."""
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    state = {"model": model, "optimizer": optimizer}

    def train_step() -> None:
        model(torch.ones(4, 2)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def evaluate() -> None:
        for _ in healer.batches([1, 2, 3]):
            break

    with healcore.Healer(state=state, store=tmp_path) as healer:
        for step in getattr(healer, loop)(4):
            train_step()
            if step == 2:
                evaluate()
        assert not run_of(healer).loop.state.left_early
        evaluate()
        assert not run_of(healer).loop.state.left_early
        for _ in healer.steps(8):
            train_step()
            break
        assert run_of(healer).loop.state.left_early, "a loop that trains on"
