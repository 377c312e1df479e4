"""What the last checkpoint of a run holds: the state where its loop, its block or `close` ended."""

import gc
import os
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
import torch
from torch import nn

import healcore
from healcore import Checkpoints, Healer, RunStopped
from tests import forked_programs
from tests.healer.run_directory import events, new_process

# -- runs of `healcore.start` in a process of their own --------------------------------------------

PROGRAM = """
import sys, torch, healcore
folder, what = sys.argv[1:]
def run(name, batches=150, bad=False):
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters())
    loss_fn = lambda batch: model(batch).square().mean()
    state = {"model": model, "optimizer": optimizer}
    healer = healcore.start(state=state, store=f"{folder}/{name}", loss_fn=loss_fn)
    for batch in LOOP:
        loss = healer.loss(batch) * (float("nan") if bad else 1.0)
        loss.backward(); optimizer.step(); optimizer.zero_grad()
        if what == "break" and healer.step == 70:
            break
    return healer, model
"""
LOOPS = {
    "one pass": "healer.batches([torch.randn(8, 4) for _ in range(batches)])",
    "own passes": "(b for _ in range(3) for b in healer.batches([torch.randn(8, 4)] * 50))",
    "epochs": "healer.batches([torch.randn(8, 4)] * 50, epochs=3)",
    "numbered epochs": "(b for e in healer.epochs(3) for b in healer.batches(data, epoch=e))",
    "steps": "(torch.randn(8, 4) for _ in healer.steps(150))",
}
CHANGED = """
healer, model = run("a")
print(model.weight.tolist())
with torch.no_grad():
    model.weight.zero_()
"""
TRAINED_AGAIN = """
healer, model = run("a")
print(model.weight.tolist())
"""


def run(folder: Path, end: str, what: str = "", loop: str = "one pass") -> tuple[int, str, str]:
    program = PROGRAM.replace("LOOP", LOOPS[loop])
    if "data" in LOOPS[loop]:
        program = program.replace(
            "    healer =", "    data = [torch.randn(8, 4)] * 50\n    healer ="
        )
    done = forked_programs.run("-c", program + end, folder, what)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.parametrize(
    "loop",
    [
        "one pass",
        "own passes",
        pytest.param("epochs", marks=pytest.mark.slow),
        "numbered epochs",
        "steps",
    ],
)
def test_what_a_script_changes_after_its_loop_is_not_saved(loop, tmp_path):
    status, trained, lines = run(tmp_path, CHANGED, loop=loop)
    assert (status, "completed after step 150" in lines) == (0, True), lines
    status, saved, lines = run(tmp_path, TRAINED_AGAIN, loop=loop)
    assert (status, saved) == (0, trained), lines
    assert "this run has completed at step 150" in lines


AFTERWARDS = {
    "steps of its own": """
optimizer = healer.state["optimizer"]
for _ in range(3):
    model(torch.ones(8, 4)).square().mean().backward()
    optimizer.step()
""",
    "weights that are not finite": "model.bias.data.fill_(float('inf'))\n",
    "an evaluation of other weights": """
model.weight.data.zero_()
for batch in healer.batches([torch.ones(8, 4)] * 3):
    model(batch)
""",
    "an empty optimizer": "healer.state['optimizer'].param_groups.clear()\n",
}


@pytest.mark.parametrize("afterwards", AFTERWARDS)
def test_what_a_script_does_after_its_loop_does_not_belong_to_the_run(afterwards, tmp_path):
    for _ in range(2):  # also where the run is completed already
        end = TRAINED_AGAIN + AFTERWARDS[afterwards]
        status, trained, lines = run(tmp_path, end)
        assert status == 0, lines
    assert [each["ending"] for each in events(tmp_path / "a", "end")] == ["completed"] * 2
    assert [each["step"] for each in events(tmp_path / "a", "end")] == [150] * 2
    assert run(tmp_path, TRAINED_AGAIN)[1] == trained


def test_close_saves_steps_after_the_loop(tmp_path):
    end = (
        TRAINED_AGAIN + AFTERWARDS["steps of its own"] + "healer.close()\nprint(model.bias.item())"
    )
    _, first, lines = run(tmp_path, end)
    status, second, lines = run(tmp_path, end)
    assert (status, second.split()[-1]) == (0, first.split()[-1]), lines


def test_what_a_script_changes_after_a_break_is_not_saved(tmp_path):
    _, whole, _ = run(tmp_path / "whole", TRAINED_AGAIN)
    status, _, lines = run(tmp_path / "broken", CHANGED, "break")
    assert (status, "checkpoint 70 is on disk" in lines) == (0, True), lines
    assert run(tmp_path / "broken", TRAINED_AGAIN)[1] == whole


def test_close_saves_what_is_there(tmp_path):
    status, _, lines = run(tmp_path, CHANGED + "healer.close()")
    assert status == 0, lines
    assert run(tmp_path, TRAINED_AGAIN)[1] == "[[0.0, 0.0, 0.0, 0.0]]\n"


@pytest.mark.parametrize("what", ["", "break"])
def test_close_completes_a_run_also_after_a_break(what, tmp_path):
    _, trained, lines = run(tmp_path, TRAINED_AGAIN + "healer.close()", what)
    steps = 70 if what else 150
    assert f"healcore: completed after step {steps}" in lines
    assert run(tmp_path, TRAINED_AGAIN)[1] == trained


def test_weights_that_were_replaced_after_a_loop_of_its_own_are_said_to_be_lost(tmp_path):
    """Nobody knows where a `while` loop ends: its last step is not on disk."""
    program = """
import sys, torch, healcore
torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
healer = healcore.start(state={"m": model, "o": optimizer}, store=sys.argv[1])
while healer.step < 150:
    loss = model(torch.randn(8, 4)).square().mean()
    healer.observe(loss); loss.backward(); optimizer.step(); optimizer.zero_grad()
    healer.after_step()
"""
    change = "with torch.no_grad(): model.weight.zero_()\n"
    done = forked_programs.run("-c", program, tmp_path / "kept")
    assert (done.returncode, "checkpoint 150 is on disk" in done.stderr) == (0, True)
    done = forked_programs.run("-c", program + change, tmp_path / "changed")
    assert done.returncode == 1
    assert "its last state is not saved (the program has replaced weights" in done.stderr
    assert "healer.close()" in done.stderr
    assert "resumes from the checkpoint of step 100" in done.stderr


# -- several runs of one process -------------------------------------------------------------------


@pytest.mark.parametrize("caught", [True, False])
@pytest.mark.parametrize("order", ["stopped run first", "stopped run last"])
def test_a_run_that_stops_ends_no_other_run(order, caught, tmp_path):
    healthy = 'keep = run("healthy")\n'
    stopped = 'run("stopped", bad=True)\n'
    if caught:
        stopped = "try: run('stopped', bad=True)\nexcept healcore.RunStopped: pass\n"
    elif order == "stopped run first":
        # What a side thread raises ends no program.
        stopped = (
            "import threading\nt = threading.Thread(target=run, args=('stopped', 150, True))\n"
        )
        stopped += "t.start()\nt.join()\n"
    end = stopped + healthy if order == "stopped run first" else healthy + stopped
    status, _, lines = run(tmp_path, end)
    assert status == int(not caught and order == "stopped run last"), lines
    assert [each["ending"] for each in events(tmp_path / "healthy", "end")] == ["completed"]
    assert [each["ending"] for each in events(tmp_path / "stopped", "end")] == ["stopped"]
    assert "checkpoint 150 is on disk" in lines


@pytest.mark.parametrize(
    ("end", "ending"),
    [
        ("raise ValueError('wrong')", "exception"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", "signal"),
        ("raise KeyboardInterrupt", "interrupted"),
        pytest.param("sys.exit(3)", "requested", marks=pytest.mark.slow),
    ],
)
def test_what_ends_one_run_does_not_end_the_run_before_it(end, ending, tmp_path):
    program = PROGRAM.replace("LOOP", LOOPS["one pass"])
    in_the_body = (
        f"        if name == 'later' and healer.step == 40: {end}\n        loss.backward()"
    )
    program = program.replace("        loss.backward()", in_the_body)
    keeps = "kept = run('earlier')\nrun('later')\n"
    done = forked_programs.run("-c", program + keeps, tmp_path, "")
    assert done.returncode != 0
    assert [each["ending"] for each in events(tmp_path / "earlier", "end")] == ["completed"]
    assert [each["ending"] for each in events(tmp_path / "later", "end")] == [ending]


@pytest.mark.parametrize("ended", ["raise ValueError", "os.kill(os.getpid(), 15)"])
def test_the_end_of_a_block_does_not_end_the_run_of_a_script_before_it(ended, tmp_path):
    end = f"""
import os
kept = run("earlier")
model = torch.nn.Linear(4, 1)
state = {{"m": model, "o": torch.optim.SGD(model.parameters(), 0.1)}}
with healcore.Healer(state=state, store=f"{{folder}}/later") as healer:
    for step in healer.steps(20):
        if step == 10:
            {ended}
        model(torch.ones(8, 4)).square().mean().backward()
        state["o"].step()
"""
    assert run(tmp_path, end)[0] != 0
    assert [each["ending"] for each in events(tmp_path / "earlier", "end")] == ["completed"]


def test_the_program_waits_for_a_run_in_another_thread(tmp_path):
    end = """
import pathlib, threading, time
threading.Thread(target=run, args=("side", 400)).start()
while not any(pathlib.Path(folder).glob("side/step-0000000100*")):
    time.sleep(0.01)
raise ValueError("in the main thread")
"""
    assert run(tmp_path, end)[0] == 1
    (ended,) = events(tmp_path / "side", "end")
    assert (ended["ending"], ended["step"]) == ("completed", 400)


def test_a_retry_with_another_name_of_the_same_directory(tmp_path):
    end = """
import pathlib
kept = []
try: run("a", bad=True)
except healcore.RunStopped as error: kept.append(error)
folder = folder + "/../" + pathlib.Path(folder).name
run("a")
"""
    status, _, lines = run(tmp_path, end)
    assert status == 0, lines


def test_a_stop_that_leaves_the_block_of_another_run_does_not_stop_it(tmp_path):
    model, other = nn.Linear(2, 1), nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    others = torch.optim.SGD(other.parameters(), 0.1)

    def train() -> None:
        with Healer(state={"m": model, "o": optimizer}, store=tmp_path / "outer") as healer:
            for _ in healer.steps(5):
                train_step(healer, model, optimizer)
            with Healer(state={"m": other, "o": others}, store=tmp_path / "inner") as inner:
                for _ in inner.batches(range(150)):
                    train_step(inner, other, others, float("nan"))

    with pytest.raises(RunStopped):
        train()
    assert events(tmp_path / "inner", "end")[0]["ending"] == "stopped"
    assert events(tmp_path / "outer", "end")[0]["ending"] == "exception"
    new_process()
    with Healer(state={"m": model, "o": optimizer}, store=tmp_path / "outer") as healer:
        assert healer.step == 5
        assert list(healer.steps(5)) == []


RETRY = """
try: run("a", bad=True)
except healcore.RunStopped: print("stopped")
"""


def test_a_retry_in_the_same_process_begins_where_a_new_process_begins(tmp_path):
    same = run(tmp_path / "same", RETRY + 'print("again"); run("a")')
    run(tmp_path / "new", RETRY)
    new = run(tmp_path / "new", 'run("a")')
    assert (same[0], new[0]) == (0, 0), same[2] + new[2]
    for kind in ("resume", "end", "save"):
        steps = [
            [each["step"] for each in events(tmp_path / name / "a", kind)]
            for name in ("same", "new")
        ]
        assert steps[0] == steps[1], kind


def train_step(healer: Any, model: Any, optimizer: Any, factor: float = 1.0) -> None:
    loss = (model(torch.ones(4, 2)) - 1).square().mean() * factor
    healer.observe(loss)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def trained(folder: Path) -> None:
    """A run of `start` in a function, which nobody closes."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    healer = healcore.start(state={"m": model, "o": optimizer}, store=folder)
    for _ in healer.batches(range(20)):
        train_step(healer, model, optimizer)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_runs_that_nobody_closes_keep_no_threads_and_files(tmp_path):
    for number in range(3):
        trained(tmp_path / str(number))
    gc.collect()
    threads, files = set(threading.enumerate()), open_files()
    for number in range(3, 9):
        trained(tmp_path / str(number))
    gc.collect()
    for each in {*threading.enumerate()} - threads:
        each.join(10)
        assert not each.is_alive(), each
    assert open_files() <= files
    ends = [events(tmp_path / str(number), "end") for number in range(8)]
    assert [each[0]["ending"] for each in ends] == ["completed"] * 8, "closed by the next `start`"


def test_folds_of_one_model_and_one_optimizer(tmp_path):
    """The next fold ends the run before it, whose state was saved at the end of its loop."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    weights = []
    for fold in range(3):
        model.reset_parameters()
        state = {"m": model, "o": optimizer}
        healer = healcore.start(state=state, store=tmp_path / str(fold))
        for _ in healer.batches(range(20)):
            train_step(healer, model, optimizer)
        weights.append(model.weight.tolist())
    healer.close()
    for fold in range(3):
        new_process()
        with Healer(state=state, store=tmp_path / str(fold), resume=True) as healer:
            assert healer.step == 20
            assert model.weight.tolist() == weights[fold]


def test_a_run_in_a_side_thread_says_that_it_gets_no_signals(tmp_path, capsys):
    thread = threading.Thread(target=trained, args=(tmp_path,))
    thread.start()
    thread.join()
    assert "the run was opened in a side thread" in capsys.readouterr().err


# -- a block saves what is there at its end --------------------------------------------------------


def small_run(folder: Path) -> tuple[Any, Any, Healer[Any]]:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
    state = {"m": model, "o": optimizer}
    return model, optimizer, Healer(state=state, store=folder, checkpoints=Checkpoints(every=5))


@pytest.mark.parametrize("steps", [9, 10])
def test_what_a_block_changes_after_its_loop_is_saved(steps, tmp_path):
    """After 10 steps a regular save has the last step, with the weights before the change."""
    biases = []
    for best in (7.0, 3.0):
        new_process()
        model, optimizer, healer = small_run(tmp_path)
        with healer:
            for _ in healer.batches(range(steps)):
                train_step(healer, model, optimizer)
            nn.init.constant_(model.bias, best)
            healer.expect_change()
        biases.append(model.bias.item())
    assert biases == [7.0, 7.0], "the completed run keeps what its first process has put there"


@pytest.mark.parametrize("leaves", [False, True])
def test_what_follows_a_save_in_the_body_is_saved(leaves, tmp_path):
    """A scheduler steps after `healer.save()`, in the last epoch too, and also after a `break`."""
    ends = []
    for _ in range(2):
        new_process()
        model, optimizer, healer = small_run(tmp_path)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        healer = Healer(
            state={"m": model, "o": optimizer, "s": scheduler},
            store=tmp_path,
            checkpoints=Checkpoints(every=5),
        )
        taken = 0
        with healer:
            for epoch in healer.epochs(3):
                for number, _ in enumerate(healer.batches(list(range(5)), epoch=epoch)):
                    train_step(healer, model, optimizer)
                    taken += 1
                    if leaves and number == 2:
                        healer.save()
                        break
                if not leaves:
                    healer.save()
                scheduler.step()
                nn.init.constant_(model.bias, float(epoch))
        ends.append((healer.step, model.weight.tolist(), model.bias.item(), scheduler.last_epoch))
        if not leaves:
            assert optimizer.param_groups[0]["lr"] == 0.1 / 8
    assert ends[0] == ends[1]
    assert taken == 0


LEFT_EPOCHS = """
import os, signal, sys, torch, healcore
folder, kill = sys.argv[1], int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
data = torch.utils.data.DataLoader(torch.randn(160, 3), batch_size=8, shuffle=True)
with healcore.Healer(state={"m": model, "o": optimizer}, store=folder) as healer:
    for epoch in healer.epochs(3):
        for batch in healer.batches(data, epoch=epoch):
            loss = model(batch).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if healer.batch_index == 11:
                break
        healer.save()
        if epoch == kill:
            while not any(f"{healer.step:010}" in each for each in os.listdir(folder)):
                pass
            os.kill(os.getpid(), signal.SIGKILL)
print(healer.step, model.weight.tolist())
"""


@pytest.mark.parametrize("kill", [0, 1])
def test_a_kill_after_an_epoch_that_a_break_has_left(kill, tmp_path):
    """The program has saved after the `break`: the epoch is over."""
    whole = forked_programs.run("-c", LEFT_EPOCHS, tmp_path / "whole", -1)
    assert forked_programs.run("-c", LEFT_EPOCHS, tmp_path / "killed", kill).returncode == -9
    again = forked_programs.run("-c", LEFT_EPOCHS, tmp_path / "killed", -1)
    assert whole.stdout.startswith("36 "), whole.stderr
    assert again.stdout == whole.stdout, again.stderr


# -- a `break` within an accumulation -------------------------------------------------------------


def accumulate_in_torch(folder: Path, limit: int) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), 0.05)
    data = [torch.randn(8, 3) for _ in range(16)]
    with Healer(state={"m": model, "o": optimizer}, store=folder) as healer:
        for batch in healer.batches(data):
            loss = (model(batch) - 1).square().mean() / 4
            healer.observe(loss)
            loss.backward()
            if healer.batch_index % 4 == 3:
                optimizer.step()
                optimizer.zero_grad()
            if healer.batch_index == limit:
                break
    return [value for each in model.state_dict().values() for value in each.flatten().tolist()]


@pytest.mark.parametrize("limit", [3, 5, 6, 12])
def test_a_break_within_an_accumulation_loses_no_micro_batch_in_torch(limit, tmp_path):
    whole = accumulate_in_torch(tmp_path / "whole", 99)
    new_process()
    accumulate_in_torch(tmp_path / "broken", limit)
    new_process()
    assert accumulate_in_torch(tmp_path / "broken", 99) == whole


def accumulate_in_jax(folder: Path, limit: int, *, hidden: bool) -> list[float]:
    """`hidden`: whether the accumulation hides its micro-batches from `protect`."""
    data = [jax.random.normal(jax.random.key(i), (8, 3)) for i in range(16)]
    if hidden:
        steps = optax.MultiSteps(healcore.jax.protect(optax.adam(0.1)), 4)
        tx = optax.with_extra_args_support(steps.gradient_transformation())
    else:
        tx = healcore.jax.protect(optax.MultiSteps(optax.adam(0.1), 4).gradient_transformation())

    def loss_of(params: Any, batch: Any) -> Any:
        return jnp.mean((batch @ params - 1) ** 2)

    @jax.jit
    def step(state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_of)(state[0], batch)
        updates, opt_state = tx.update(grads, state[1], state[0], value=value)
        return optax.apply_updates(state[0], updates), opt_state

    params = jnp.zeros(3)
    taken = 0
    with Healer(state=(params, tx.init(params)), store=folder) as healer:
        for batch in healer.batches(data):
            healer.update(step(healer.state, batch))
            taken += 1
            if taken == limit:
                break
    return healer.state[0].tolist()


@pytest.mark.parametrize("hidden", [False, True])
@pytest.mark.parametrize("limit", [4, 6, pytest.param(7, marks=pytest.mark.slow)])
def test_a_break_within_an_accumulation_loses_no_micro_batch_in_jax(limit, hidden, tmp_path):
    whole = accumulate_in_jax(tmp_path / "whole", 99, hidden=hidden)
    new_process()
    accumulate_in_jax(tmp_path / "broken", limit, hidden=hidden)
    new_process()
    assert accumulate_in_jax(tmp_path / "broken", 99, hidden=hidden) == whole
