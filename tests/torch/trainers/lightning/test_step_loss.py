"""Comparisons by the module's own `training_step`, which leave no trace."""

import csv
import logging
import random
from collections import Counter
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
import torchmetrics
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.utils.data import DataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback
from tests.open_run import run_of
from tests.torch.trainers.lightning.fits import (
    Gan,
    Regression,
    data,
    fit,
    vector,
)


class Notes:
    """An object of the program with a state of its own."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.table = np.zeros(3)


class Busy(Regression):
    """Its training_step logs, counts, draws and writes in all the ways that modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.error: Any = torchmetrics.MeanSquaredError()
        self.more: Any = torchmetrics.MetricCollection(
            {"absolute": torchmetrics.MeanAbsoluteError()}
        )
        self.scale: Any
        self.register_buffer("scale", torch.ones(()))
        self.noise = np.random.default_rng(0)
        self.outputs: list[Tensor] = []
        self.calls = 0
        self.notes = Notes()
        self.kinds = Counter[str]()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)
        x, y = batch
        guess = self.net(x + 0.01 * float(self.noise.normal()) + 0.01 * torch.randn(()))
        self.error(guess, y)
        self.log("error", self.error, on_step=True, on_epoch=True)
        self.log_dict(self.more(guess, y))
        self.logger.experiment.log_metrics({"own": self.calls}, step=self.calls)  # type: ignore[union-attr]
        self.scale.mul_(0.99)
        self.calls += 1
        self.outputs.append(guess.detach())
        self.last = guess
        self.notes.losses.append(random.random())
        self.notes.table += 1
        self.kinds["step"] += 1
        return {"loss": (guess - self.scale * y).square().mean(), "more": guess.detach()}


def facts(module: Busy, running: Any) -> dict[str, Any]:
    """What a fit leaves, apart from the weights."""
    metrics: dict[str, Any] = module.error.metric_state | module.more["absolute"].metric_state
    return {
        **{name: value.tolist() for name, value in metrics.items()},
        "updates": (module.error._update_count, module.more["absolute"]._update_count),
        "scale": float(module.scale),
        "noise": module.noise.bit_generator.state,
        "outputs": [each.tolist() for each in module.outputs],
        "calls": (module.calls, module.kinds, module.seen),
        "notes": (module.notes.losses, module.notes.table.tolist()),
        "random": (random.getstate(), torch.get_rng_state().tolist()),
        "steps": (running.global_step, module.training, repr(running.callback_metrics)),
        "rows": sorted(
            sorted((k, v) for k, v in row.items() if "heal/" not in k and v)
            for row in csv.DictReader(Path(running.logger.log_dir, "metrics.csv").open())
        ),
    }


def test_a_comparison_leaves_no_trace(tmp_path: Path):
    """Metrics, logs, attributes, buffers and generators are as without healcore."""
    found = []
    callback = LightningHealingCallback(store=tmp_path / "store")
    for number, callbacks in enumerate(([], [callback])):
        random.seed(0)
        logger = CSVLogger(tmp_path, version=number)
        options: Any = {"logger": logger, "log_every_n_steps": 1, "max_epochs": 2}
        module, running = fit(*callbacks, make=Busy, precision="bf16-mixed", **options)
        found.append((vector(module).tolist(), facts(module, running)))
    compared = run_of(callback.healer).witness  # type: ignore[arg-type]
    assert compared.is_enabled
    assert compared.loss_function.is_checked
    plain, healed = found
    assert healed[0] == plain[0]
    for name, fact in plain[1].items():
        assert healed[1][name] == fact, name


class Damage(lightning.Callback):
    def on_train_batch_start(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 30:
            with torch.no_grad():
                pl_module.net[2].weight.mul_(30)


class Slow(Regression):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 1e-3)


@pytest.mark.slow
def test_damaged_weights_are_rolled_back_without_a_loss_fn():
    rollbacks = []

    def rows() -> list[Any]:
        return [DataLoader(data(), 8, shuffle=True)]

    for loss_fn in (None, "auto"):
        options: Any = {"loss_fn": loss_fn, "rollback": {"probation": 10}}
        callback = LightningHealingCallback(checkpoints=Checkpoints(every=10), **options)
        fit(Damage(), callback, make=Slow, loaders=rows, max_epochs=10)
        rollbacks.append(callback.healer.rollbacks)  # type: ignore[union-attr]
    assert rollbacks[0] == 0
    assert rollbacks[1] >= 1


class Handle:
    def __deepcopy__(self, memo: Any) -> Any:
        raise TypeError("a simulator written in C")


class Acting(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.env = {"world": Handle()}


class Large(Regression):
    def __init__(self) -> None:
        super().__init__()
        self.replay = np.zeros((1 << 22, 2), np.float32)


class Quiet(Regression):
    """Returns no loss when it is called again, as a step that leaves out a batch it knows."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if torch.is_grad_enabled():
            return super().training_step(batch, batch_idx)
        return None


class Once(Regression):
    """Raises when it is called again, without gradients."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if not loss.requires_grad:
            raise RuntimeError("a step of its own")
        return loss


class Penalized(Regression):
    """Differentiates within its step, as a gradient penalty."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        (slope,) = torch.autograd.grad(loss, [self.net[0].weight], create_graph=True)  # type: ignore[index]
        return loss + 0.1 * slope.square().mean()


def test_a_step_that_differentiates_is_compared_with_the_same_bits():
    plain, _ = fit(make=Penalized)
    callback = LightningHealingCallback()
    module, _ = fit(callback, make=Penalized)
    assert run_of(callback.healer).witness.is_enabled  # type: ignore[arg-type]
    assert torch.equal(vector(module), vector(plain))
    assert module.seen == plain.seen


@pytest.mark.parametrize(
    ("make", "why"),
    [
        pytest.param(Gan, "its optimization is manual", id="manual optimization"),
        pytest.param(Acting, "self.env cannot be copied", id="environment"),
        pytest.param(Large, "self.replay is too large", id="large array"),
        pytest.param(
            Once,
            "training_step raised RuntimeError when it was called again: a step of its own",
            id="a step that runs once",
        ),
        pytest.param(
            Quiet, "training_step returns no loss, so no weights are compared", id="no loss"
        ),
    ],
)
def test_what_cannot_be_undone_is_named(make: Any, why: str, caplog):
    caplog.set_level(logging.INFO, "healcore")
    module, _ = fit(LightningHealingCallback(), make=make)
    assert why in caplog.text
    assert len({tuple(each) for each in module.seen}) == len(module.seen) == 8
    caplog.clear()
    fit(LightningHealingCallback(loss_fn=None), make=make)
    assert "compared" not in caplog.text
