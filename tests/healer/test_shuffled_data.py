"""A DataLoader that shuffles, in the loop that README shows, killed and started again."""

import json
import signal
from pathlib import Path

import pytest

from tests import forked_programs

PROGRAM = """
import json, os, pathlib, sys
import torch
import healcore

kill_at, workers = int(sys.argv[1]), int(sys.argv[2])
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(1, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
rows = torch.utils.data.TensorDataset(torch.arange(60.0)[:, None])
loader = torch.utils.data.DataLoader(rows, batch_size=4, shuffle=True, num_workers=workers)
state = {"model": model, "optimizer": optimizer}
checkpoints = healcore.Checkpoints(every=5)
healer = healcore.Healer(state=state, store="run", checkpoints=checkpoints)
with healer, open("rows", "a") as file:
    for epoch in healer.epochs(3):
        for (batch,) in healer.batches(loader, epoch=epoch):
            step = healer.step
            loss = (model(batch / 60) - batch / 30).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(json.dumps([step, epoch, batch.flatten().tolist()]), file=file, flush=True)
            if step == kill_at:
                os.kill(os.getpid(), 9)
weights = torch.cat([each.detach().flatten() for each in model.parameters()])
pathlib.Path("weights").write_text(json.dumps(weights.tolist()))
"""
BATCHES = 15
"""Batches of an epoch."""


def run(folder: Path, kill_at: int = -1, workers: int = 0) -> tuple[list[list[list[float]]], str]:
    """Trains in processes until the run is complete.

    Args:
        folder: working directory of the program.
        kill_at: step after which the first process is killed, or -1 for no kill.
        workers: number of worker processes of the loader.

    Returns:
        The rows of each step, in the order of the steps, by epoch; and the final weights. A step
        that was repeated has the rows of its last try.
    """
    folder.mkdir()
    if kill_at >= 0:
        killed = forked_programs.run("-c", PROGRAM, str(kill_at), str(workers), cwd=folder)
        assert killed.returncode == -signal.SIGKILL, killed.stderr
    done = forked_programs.run("-c", PROGRAM, "-1", str(workers), cwd=folder)
    assert done.returncode == 0, done.stderr
    steps: dict[int, tuple[int, list[float]]] = {}
    for line in (folder / "rows").read_text().splitlines():
        step, epoch, rows = json.loads(line)
        steps[step] = epoch, rows
    epochs: list[list[list[float]]] = [[], [], []]
    for step in sorted(steps):
        epoch, rows = steps[step]
        epochs[epoch].append(rows)
    return epochs, (folder / "weights").read_text()


@pytest.mark.parametrize(
    "kill_at",
    [
        7,
        BATCHES - 1,
        pytest.param(BATCHES, marks=pytest.mark.slow),
        pytest.param(2 * BATCHES + 3, marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_has_each_row_once_and_the_same_bits(kill_at: int, tmp_path: Path):
    """Within an epoch, after its last step, after the first step of the next, and in the last."""
    epochs, weights = run(tmp_path / "whole")
    resumed_epochs, resumed_weights = run(tmp_path / "killed", kill_at)
    for batches in resumed_epochs:
        rows = sorted(row for batch in batches for row in batch)
        assert rows == [float(row) for row in range(60)]
    assert len({str(batches) for batches in resumed_epochs}) == 3, "each epoch has its own order"
    assert resumed_epochs == epochs
    assert resumed_weights == weights


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_change_nothing(workers: int, tmp_path: Path):
    epochs, weights = run(tmp_path / "whole", workers=workers)
    assert run(tmp_path / "killed", 2 * BATCHES - 4, workers) == (epochs, weights)
