"""Ray Train restarts its workers, and the Healer resumes them: the added lines are marked.

With a step as the second argument, worker 1 is killed there once. The final weights are the
same as in a run without a kill.

python examples/ray_train.py DIRECTORY [STEP]        (pip install "ray[train]")
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

import ray  # pyright: ignore[reportMissingImports]
import torch
from ray.train import FailureConfig, RunConfig, ScalingConfig  # pyright: ignore
from ray.train.torch import TorchTrainer, prepare_model  # pyright: ignore[reportMissingImports]
from torch.nn.functional import mse_loss
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from healcore import Healer  # <- healcore


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    x = torch.randn(1600, 16)
    rows = TensorDataset(x, x.sin().sum(1, keepdim=True))
    loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows))
    model = prepare_model(torch.nn.Linear(16, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    state = {"model": model, "optimizer": optimizer}  # <- healcore
    with Healer(state=state, store=config["store"]) as healer:  # <- healcore
        for x, y in healer.batches(loader, epochs=3):  # <- healcore
            loss = mse_loss(model(x), y)
            healer.observe(loss)  # <- healcore
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            kill(healer.step, config)
    weights = b"".join(p.detach().numpy().tobytes() for p in model.parameters())
    Path(config["store"], "weights").write_text(hashlib.sha256(weights).hexdigest())
    ray.train.report({"loss": loss.item()})


def kill(step: int, config: dict[str, Any]) -> None:
    """Kills worker 1 at a step, once."""
    killed, rank = Path(config["store"], "killed"), ray.train.get_context().get_world_rank()
    if step == config["kill_at"] and rank == 1 and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), signal.SIGKILL)


def main(directory: str, kill_at: str = "-1") -> None:
    """Trains with two workers, which may fail twice."""
    store = Path(directory).absolute()
    ray.init(num_cpus=2, include_dashboard=False)
    TorchTrainer(
        train,
        train_loop_config={"store": str(store / "checkpoints"), "kill_at": int(kill_at)},
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            storage_path=str(store / "ray"), failure_config=FailureConfig(max_failures=2)
        ),
    ).fit()
    print("weights", (store / "checkpoints" / "weights").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
