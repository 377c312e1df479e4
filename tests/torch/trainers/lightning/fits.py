"""Small fits: a regression and a GAN as a LightningModule, their data, and a quiet Trainer."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import lightning
import torch
from lightning.pytorch import callbacks as given
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

NAN = float("nan")


class Seen(NamedTuple):
    """A batch that was trained on, and Lightning's counters then."""

    epoch: int
    index: int
    step: int
    inputs: float


class Regression(lightning.LightningModule):
    """Learns the sine of the inputs' sum with SGD; `seen` is every batch that it was trained on."""

    def __init__(self, rate: float = 0.05, *, warmup: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 1))
        self.rate, self.warmup = rate, warmup
        self.seen: list[Seen] = []

    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        trainer = self.trainer
        inputs = float(batch[0].sum())
        self.seen.append(Seen(trainer.current_epoch, batch_idx, trainer.global_step, inputs))
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.rate)
        if not self.warmup:
            return optimizer
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=self.warmup)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Displacement(lightning.Callback):
    """The learning rate of each SGD step: norm of the update over norm of the gradient."""

    def __init__(self) -> None:
        self.rates: list[float] = []
        self._before: Any = None

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        grads = [p.grad.flatten().clone() for p in pl_module.parameters()]
        self._before = vector(pl_module), torch.cat(grads)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        old, grad = self._before
        self.rates.append(float((vector(pl_module) - old).norm() / grad.norm()))


def vector(module: nn.Module) -> Tensor:
    """All parameters, as one vector."""
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def data(batches: int = 8, batch: int = 8, *, bad: int | None = None) -> TensorDataset:
    """A data set; `bad`: the batch that holds a NaN if it is not shuffled."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(batches * batch, 8, generator=generator)
    y = x.sum(1, keepdim=True).sin()
    if bad is not None:
        x[bad * batch] = NAN
    return TensorDataset(x, y)


def trainer(*callbacks: Any, **options: Any) -> Any:
    """A Trainer on the CPU that prints and writes nothing."""
    off = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    quiet = dict.fromkeys(off, False)
    return lightning.Trainer(accelerator="cpu", callbacks=[*callbacks], **{**quiet, **options})


def fit(
    *callbacks: Any,
    make: Callable[[], Any] = Regression,
    loaders: Callable[[], Any] = lambda: [DataLoader(data(), 8)],
    ckpt_path: Any = None,
    **options: Any,
) -> tuple[Any, Any]:
    """Trains one epoch, or as the options say; returns the module and its Trainer."""
    torch.manual_seed(0)
    module = make()
    running = trainer(*callbacks, **{"max_epochs": 1, **options})
    running.fit(module, *loaders(), ckpt_path=ckpt_path)
    return module, running


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
        return [torch.optim.Adam(each.parameters(), 1e-3) for each in (self.maker, self.judge)]


def shuffled(kind: Any = DataLoader, batches: int = 8) -> Any:
    return kind(data(batches), batch_size=8, shuffle=True)


average = partial(given.EMAWeightAveraging, decay=0.5)


swa = partial(given.StochasticWeightAveraging, 0.02, swa_epoch_start=1)
