"""The README's and the documentation's snippets of trainers, unchanged, on two ranks.

    python -m tests.packaging.trainers_ranks RANK PORT ROOT

With the environment that torchrun makes. Rank 1 alone has a batch whose loss is NaN, or a gradient
that is. Prints a JSON pair for each snippet: its name and what this rank has seen.
"""

# The snippets' names are bound in dictionaries; trl imports its classes on first use.
# pyright: reportArgumentType=false, reportPrivateImportUsage=false

from __future__ import annotations

import faulthandler
import hashlib
import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import accelerate
import lightning
import lightning.fabric
import torch
import torch.distributed as dist
import trl
from datasets import Dataset
from torch.utils.data import DataLoader, TensorDataset

import healcore
import healcore.torch
from tests.torch.trainers.huggingface import tiny_trainers
from tests.torch.trainers.lightning import fits

PAGES = Path(__file__).parents[2]
WORLD, SECONDS, STEPS, BAD = 2, 300, 6, 3


def lines(page: str, first: str, last: str, also: str = "") -> str:
    """The lines of a page from one that contains `first` to one that contains `last`.

    Of the one snippet that contains both, and `also`.
    """
    (found,) = [
        block
        for block in re.findall(r"^```python\n(.*?)^```", (PAGES / page).read_text(), re.M | re.S)
        if first in block and last in block and also in block
    ]
    every = found.splitlines(keepends=True)
    start = next(i for i, line in enumerate(every) if first in line)
    end = next(i for i, line in enumerate(every) if last in line and i >= start)
    return "".join(every[start : end + 1])


def digest(module: torch.nn.Module) -> str:
    parts = [each.detach().numpy().tobytes() for each in module.state_dict().values()]
    return hashlib.sha256(b"".join(parts)).hexdigest()


class OneBad:
    """A loss that is NaN on rank 1 in one call with gradients; comparisons of weights have none."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, loss: torch.Tensor) -> torch.Tensor:
        self.calls += torch.is_grad_enabled()
        bad = dist.get_rank() == 1 and self.calls == BAD and torch.is_grad_enabled()
        return loss * (float("nan") if bad else 1.0)


def seen(module: torch.nn.Module, skips: float) -> dict[str, Any]:
    finite = all(bool(each.isfinite().all()) for each in module.state_dict().values())
    return {"weights": digest(module), "finite": finite, "skips": int(skips)}


def skips(healing: Any) -> float:
    return healing.metrics()["heal/skips"]


# -- transformers and TRL -------------------------------------------------------------------------


def language_trainer(kind: Any, arguments: Any, root: Path) -> Callable[..., Any]:
    """What the README's `SFTTrainer(...)` calls."""

    def make(rest: Any, *, callbacks: list[Any] | None = None) -> Any:
        assert rest is ...
        bad = OneBad()

        class OneRankFails(kind):
            def compute_loss(self, *args: Any, **options: Any) -> Any:
                return bad(super().compute_loss(*args, **options))

        rows = {"input_ids": tiny_trainers.rows(), "labels": tiny_trainers.rows()}
        return OneRankFails(
            model=tiny_trainers.model(),
            args=tiny_trainers.arguments(
                root, arguments, max_steps=STEPS, save_strategy="steps", save_steps=2
            ),
            train_dataset=Dataset.from_dict(rows),
            processing_class=tiny_trainers.tokenizer(),
            callbacks=callbacks,
        )

    return make


def language(kind: Any, arguments: Any, root: Path) -> dict[str, Any]:
    make, made = language_trainer(kind, arguments, root), []

    def made_with(*args: Any, **options: Any) -> Any:
        made.append(make(*args, **options))
        return made[-1]

    scope: dict[str, Any] = {"SFTTrainer": made_with, "healcore": healcore}
    if kind is trl.SFTTrainer:
        exec(lines("README.md", "trainer = SFTTrainer(", "trainer = SFTTrainer("), scope)
        scope["trainer"].train()
    else:
        exec(lines("README.md", "heal_trainer(SFTTrainer(", "heal_trainer(SFTTrainer("), scope)
    (trainer,) = made
    logged = [each.get("heal/skips", 0) for each in trainer.state.log_history]
    return seen(trainer.model, max(logged))


# -- Lightning ------------------------------------------------------------------------------------


class OneRankFails(fits.Regression):
    def __init__(self) -> None:
        super().__init__()
        self.bad = OneBad()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.bad(super().training_step(batch, batch_idx))


def rows() -> TensorDataset:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(WORLD * STEPS * 4, 8, generator=draw)
    return TensorDataset(x, x.sum(1, keepdim=True).sin())


def fit(page: str, first: str, last: str, root: Path) -> dict[str, Any]:
    """`Trainer(callbacks=[...])` of Lightning, with two processes and for one epoch."""

    def make(*rest: Any, callbacks: list[Any], max_epochs: int | None = None) -> Any:
        return lightning.Trainer(
            callbacks=callbacks,
            accelerator="cpu",
            devices=WORLD,
            strategy="ddp",
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=root,
        )

    torch.manual_seed(0)
    module = OneRankFails()
    scope: dict[str, Any] = {"Trainer": make, "healcore": healcore, "module": module}
    scope["lightning"] = SimpleNamespace(Trainer=make)
    exec(lines(page, first, last), scope)
    trainer = scope["trainer"]
    trainer.fit(module, DataLoader(rows(), batch_size=4))
    (callback,) = (each for each in trainer.callbacks if "Healing" in type(each).__name__)
    return seen(module, skips(callback.healings["optimizer"]))


def fabric(root: Path) -> dict[str, Any]:
    torch.manual_seed(0)
    running = lightning.fabric.Fabric(accelerator="cpu", devices=WORLD, strategy="ddp")
    running.launch()
    net, bad = torch.nn.Linear(8, 1), OneBad()
    scope = {
        "fabric": running,
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.01),
        "loader": running.setup_dataloaders(DataLoader(rows(), batch_size=4)),
        "healcore": healcore,
    }
    page = "docs/trainers/lightning.md"
    exec(lines(page, "fabric.setup(", "square().mean()"), scope)
    loss_fn = scope["loss_fn"]
    scope["loss_fn"] = lambda batch: bad(loss_fn(batch))
    exec(lines(page, "state = {", "zero_grad()"), scope)
    return seen(net, skips(scope["healer"]))


# -- Accelerate -----------------------------------------------------------------------------------


def accelerated(root: Path, *, healer: bool) -> dict[str, Any]:
    torch.manual_seed(0)
    net, bad = torch.nn.Linear(8, 1), OneBad()
    scope: dict[str, Any] = {
        "accelerator": accelerate.Accelerator(cpu=True, gradient_accumulation_steps=1),
        "model": net,
        "optimizer": torch.optim.SGD(net.parameters(), lr=0.01),
        "loader": DataLoader(rows(), batch_size=4),
        "healcore": healcore,
    }
    page = "docs/trainers/others.md"
    exec(lines(page, "accelerator.prepare(", "square().mean()"), scope)
    loss_fn = scope["loss_fn"]
    scope["loss_fn"] = lambda batch: bad(loss_fn(batch))
    first = "state = {" if healer else "heal = healcore.torch.attach("
    exec(lines(page, first, "zero_grad()", also="accelerator."), scope)
    return seen(net, skips(scope["healer" if healer else "heal"]))


CASES: dict[str, Callable[[Path], dict[str, Any]]] = {
    "SFTTrainer": lambda root: language(trl.SFTTrainer, trl.SFTConfig, root),
    "Trainer, heal": lambda root: language(
        tiny_trainers.Trainer, tiny_trainers.TrainingArguments, root
    ),
    "Lightning": lambda root: fit("README.md", "# Lightning", "LightningHealingCallback(", root),
    "Lightning, store": lambda root: fit(
        "docs/trainers/lightning.md", "LightningHealingCallback(", "lightning.Trainer(", root
    ),
    "Fabric": fabric,
    "Accelerate": lambda root: accelerated(root, healer=False),
    "Accelerate, Healer": lambda root: accelerated(root, healer=True),
}


def main(rank: int, port: str, root: Path) -> None:
    faulthandler.dump_traceback_later(SECONDS, exit=True)
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(WORLD),
        "LOCAL_WORLD_SIZE": str(WORLD),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_RUN_ID": "none",
        "ACCELERATE_USE_CPU": "true",
    }
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    for name, run in CASES.items():
        folder = root / name.replace(", ", "-")
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        print(json.dumps([name, run(folder)]), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
