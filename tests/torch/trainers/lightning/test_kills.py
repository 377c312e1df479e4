"""A fit that is killed goes on with the same command."""

from __future__ import annotations

import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, Seen, data, trainer

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the killed processes")


class Killed(Regression):
    """Sends its process a signal in the 14th step, once."""

    def __init__(self, number: int | None, mark: Path) -> None:
        super().__init__(warmup=20)
        self.number, self.mark = number, mark

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.number is not None and self.trainer.global_step == 13 and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), self.number)
        return super().training_step(batch, batch_idx)


class Epochs(lightning.Callback):
    """Needs the batches of each epoch at its end, as a module that stacks its outputs does."""

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        assert pl_module.seen, "an epoch without a batch"


def program(folder: Path, number: int | None, loader: Any) -> None:
    """The program that is started twice: a fit with checkpoints every third step."""
    torch.manual_seed(0)
    module = Killed(number, folder / "killed")
    callback = LightningHealingCallback(
        store=folder / "store", checkpoints=Checkpoints(every=3), clip=None
    )
    running = trainer(callback, Epochs(), max_epochs=3, val_check_interval=4)
    rows = loader(data(), batch_size=8, shuffle=True)
    running.fit(module, rows, DataLoader(data(2), 8))
    counts = (running.global_step, running.current_epoch)
    seen = [tuple(each) for each in module.seen]
    torch.save((module.state_dict(), counts, seen), folder / "out.pt")


def run(folder: Path, number: int | None, loader: Any) -> int | None:
    """Runs it in a process of its own; the exit status."""
    process = multiprocessing.get_context("fork").Process(
        target=program, args=(folder, number, loader)
    )
    process.start()
    process.join(120)
    return process.exitcode


def result(folder: Path) -> tuple[dict[str, Any], tuple[int, int], list[Seen]]:
    weights, counts, seen = torch.load(folder / "out.pt")
    (folder / "out.pt").unlink()
    return weights, counts, [Seen(*each) for each in seen]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
def test_it_ends_with_the_same_bits(
    number: signal.Signals, loader: Any, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
):
    whole = tmp_path_factory.mktemp("whole")
    assert run(whole, None, loader) == 0
    weights, counts, seen = result(whole)
    first = run(tmp_path, number, loader)
    assert number != signal.SIGKILL or first == -signal.SIGKILL
    assert not (tmp_path / "out.pt").exists(), "it has ended"
    assert run(tmp_path, number, loader) == 0
    resumed, counts_after, rest = result(tmp_path)
    assert counts_after == counts == (24, 3)
    assert rest == seen[-len(rest) :], "the same batches, at the same epochs and steps"
    assert len(rest) < len(seen), "from a checkpoint, not from the beginning"
    if number == signal.SIGTERM:
        assert rest[0].step == 14, "the step was finished and saved"
    assert all(torch.equal(weights[name], resumed[name]) for name in weights)
    assert run(tmp_path, number, loader) == 0
    again, counts_again, none = result(tmp_path)
    assert (counts_again, none) == (counts, []), "fit returns at once, and the program goes on"
    assert all(torch.equal(weights[name], again[name]) for name in weights)
