"""A healthy fit ends bit for bit as it does without the callback."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import lightning
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore.torch import LightningHealingCallback
from tests.healer.run_options import grouped
from tests.torch.trainers.lightning.fits import Regression, data, trainer

# Without clipping: ZClip may clip a healthy step, which is a decision and not an accident.
OPTIONS = {"clip": {"kind": "fixed", "max_norm": 1e6}, "save_every": 3}


class Gan(lightning.LightningModule):
    """Two networks, two optimizers, manual optimization."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge = nn.Linear(8, 8), nn.Linear(8, 1)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> None:
        x, _ = batch
        self.seen.append((self.trainer.global_step, float(x.sum())))
        make, judge = self.optimizers()  # type: ignore[misc]
        self.toggle_optimizer(make)
        self.manual_backward((self.judge(self.maker(torch.randn_like(x))) - 1).square().mean())
        make.step()
        make.zero_grad()
        self.untoggle_optimizer(make)
        fake = self.maker(torch.randn_like(x)).detach()
        loss = (self.judge(x) - 1).square().mean() + self.judge(fake).square().mean()
        self.manual_backward(loss)
        judge.step()
        judge.zero_grad()

    def configure_optimizers(self) -> Any:
        return [
            torch.optim.Adam(self.maker.parameters(), 1e-3),
            torch.optim.Adam(self.judge.parameters(), 1e-3),
        ]


class Stream(IterableDataset):
    """A data set without a length."""

    def __iter__(self) -> Iterator[Any]:
        rows = data()
        return (rows[i] for i in range(len(rows)))


class Once(IterableDataset):
    """One that can be read only once, as a socket."""

    def __init__(self) -> None:
        self.rows = iter(Stream())

    def __iter__(self) -> Iterator[Any]:
        return self.rows


def shuffled() -> Any:
    return DataLoader(data(), batch_size=8, shuffle=True)


def stateful() -> Any:
    return StatefulDataLoader(data(), batch_size=8, shuffle=True)


def fit(module: type, loaders: Any, *callbacks: Any, **options: Any):
    torch.manual_seed(0)
    fitted: Any = module()
    running = trainer(*callbacks, **{"max_epochs": 3, **options})
    running.fit(fitted, *loaders())
    return fitted, running


class Reloaded(Regression):
    def train_dataloader(self) -> Any:
        return shuffled()


class Structured(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx)


class Several(Regression):
    """Takes its batches from two loaders of different lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])


ITERABLE = lambda: [DataLoader(Stream(), 8)]  # noqa: E731
CASES: dict[str, Any] = {
    "automatic": (Regression, lambda: [shuffled()], {}),
    "stateful": (Regression, lambda: [stateful()], {}),
    "manual": (Gan, lambda: [stateful()], {}),
    "accumulated": (Regression, lambda: [shuffled()], {"accumulate_grad_batches": 3}),
    "max_steps": (Regression, lambda: [shuffled()], {"max_steps": 13, "max_epochs": -1}),
    "validated": (Regression, lambda: [shuffled(), shuffled()], {"val_check_interval": 3}),
    "iterable": (Regression, lambda: [*ITERABLE(), shuffled()], {}),
    "read once": (Regression, lambda: [DataLoader(Once(), 8)], {}),
    "no length, limited": (
        *(Regression, ITERABLE),
        {"limit_train_batches": 5, "accumulate_grad_batches": 2},
    ),
    "limited": (Regression, lambda: [stateful()], {"limit_train_batches": 5}),
    "reloaded": (Reloaded, list, {"reload_dataloaders_every_n_epochs": 1}),
    "one of a structure": (Structured, lambda: [{"a": shuffled()}], {}),
    "several": (Several, lambda: [{"a": shuffled(), "b": DataLoader(data(3), 8, True)}], {}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits(case: str):
    module, loaders, options = CASES[case]
    plain, running = fit(module, loaders, **options)
    callback = LightningHealingCallback(**grouped(OPTIONS))
    healed, healing = fit(module, loaders, callback, **options)
    assert healed.seen == plain.seen
    assert all(map(torch.equal, plain.parameters(), healed.parameters()))
    for name in ("global_step", "current_epoch", "callback_metrics"):
        assert getattr(running, name) == getattr(healing, name), name
    ours, theirs = healing.fit_loop.state_dict(), running.fit_loop.state_dict()
    ours["state_dict"] = theirs["state_dict"]  # of the loaders
    assert ours == theirs, "all of Lightning's counters"
    taken = [int(each.live_engine.state.step) for each in callback.healings.values()]
    assert sum(taken) == running.global_step, "every step was judged"
