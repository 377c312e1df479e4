"""`Healer.start`: the end of the program ends the run. Each program is a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.healer.run_directory import events

TORCH = """
import os, signal, sys, healcore, torch
how = sys.argv[1]
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
healer = healcore.Healer(
    "default", state={"m": model, "o": optimizer}, store="store",
    checkpoints=healcore.Checkpoints(every=10),
).start()
for batch in healer.batches([torch.ones(4, 2)] * 20, epochs=None):
    loss = model(batch).square().mean()
    healer.observe(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if healer.step >= 20:
        break
"""
JAX = """
import os, signal, sys, healcore, jax, jax.numpy as jnp, optax
how = sys.argv[1]
tx = healcore.jax.protect(optax.sgd(0.01))
params = jnp.ones(2)
@jax.jit
def step(state, batch):
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((batch @ p) ** 2))(state[0])
    updates, opt_state = tx.update(grads, state[1], state[0], value=loss)
    return optax.apply_updates(state[0], updates), opt_state
healer = healcore.Healer(
    "default", state=(params, tx.init(params)), store="store",
    checkpoints=healcore.Checkpoints(every=10),
).start()
for batch in healer.batches([jnp.ones((4, 2))] * 20):
    healer.update(step(healer.state, batch))
"""
TAIL = """
match how:
    case "raise": raise ValueError
    case "exit": sys.exit(3)
    case "exit 0": sys.exit()
    case "stop": healer.stop("enough")
    case "fork":
        if os.fork() == 0:
            sys.exit(3)
        os.wait()
    case "with":
        with healer: pass
    case "kill": os.kill(os.getpid(), signal.SIGKILL)
print("last line")
"""


def run(program, how, folder):
    """Runs a program; returns the exit status and the output."""
    command = [sys.executable, "-c", program + TAIL, how]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("how", "status", "ending", "text"),
    [
        ("end", 0, "completed", "last line"),
        ("fork", 0, "completed", "last line"),
        ("exit 0", 0, "completed", "completed after step 20"),
        ("exit", 3, "exception", "ended by an exception"),
        ("raise", 1, "exception", "ValueError"),
        ("stop", 1, "stopped", "enough"),
        ("with", 1, "exception", "opened once"),
    ],
)
def test_the_end_of_the_program_is_the_end_of_the_run(how, status, ending, text, tmp_path):
    returned, output = run(TORCH, how, tmp_path)
    assert (returned, [each["ending"] for each in events(tmp_path / "store", "end")]) == (
        status,
        [ending],
    ), output
    assert text in output


def test_a_program_whose_run_is_incomplete_ends_with_status_1(tmp_path):
    program = TORCH.replace("optimizer.step()", "pass").replace("healer.step >= 20", "False")
    returned, output = run(program.replace("epochs=None", "epochs=1"), "end", tmp_path)
    assert returned == 1
    assert "the Healer has seen no step" in output.splitlines()[-1]
    assert "last line" in output


@pytest.mark.parametrize("program", [TORCH.replace("epochs=None", "epochs=1"), JAX])
def test_a_kill_before_the_last_line_is_not_completed(program, tmp_path):
    """The next start trains nothing and runs the last lines, and is complete."""
    assert run(program, "kill", tmp_path)[0] == -9
    assert not events(tmp_path / "store", "end")
    for _ in range(2):
        returned, output = run(program, "end", tmp_path)
        assert returned == 0, output
    assert [each["ending"] for each in events(tmp_path / "store", "end")] == ["completed"]
    assert "nothing to do" in output
