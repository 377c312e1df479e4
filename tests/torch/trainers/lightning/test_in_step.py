"""What the callback does in the step, and what it takes from Lightning's own options."""

from __future__ import annotations

import csv
import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from healcore.core.verdict import Cause
from healcore.torch import LightningHealingCallback
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.lightning.fits import Regression, data, trainer
from tests.torch.trainers.lightning.test_healthy import Gan


class Judged(LightningHealingCallback):
    """Keeps the decision of every step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.decisions: list[Any] = []
        self.losses: list[float] = []

    def on_train_batch_end(self, *args: Any) -> None:
        (healing,) = self.healings.values()
        decision = healing.last_decision()
        if decision is not None and healing.live_engine.state.step > len(self.decisions):
            self.decisions.append(decision)
            self.losses.append(float(healing.metrics()["heal/loss"]))


def fit(callback: Any, module: Any = None, **options: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = module or Regression()
    rows = options.pop("rows", None) or data()
    ckpt_path = options.pop("ckpt_path", None)
    running = trainer(*([callback] if callback else []), **{"max_epochs": 1, **options})
    running.fit(module, DataLoader(rows, batch_size=8), ckpt_path=ckpt_path)
    return module, running


def test_one_bad_batch_is_noticed_in_its_step(tmp_path: Path):
    callback = Judged()
    logs = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    module, running = fit(callback, rows=data(bad=3), max_epochs=2, **logs)
    causes = [bool(each.cause & Cause.NONFINITE_LOSS) for each in callback.decisions]
    assert [i for i, bad in enumerate(causes) if bad] == [3, 11]
    assert [each.skip for each in callback.decisions] == causes
    assert all(p.isfinite().all() for p in module.parameters())
    assert running.global_step == 16
    with Path(running.logger.log_dir, "metrics.csv").open() as file:
        rows = {int(row["step"]): row for row in csv.DictReader(file)}
    # Written before the step: of the step before the one before it.
    skips = {step: row["heal/skips"] for step, row in rows.items() if row["heal/skips"]}
    assert skips == {5: "1.0", 13: "2.0"}
    assert not any("heal/loss" in row for row in rows.values())


@pytest.mark.parametrize("parts", [1, 3])
def test_the_loss_is_the_one_that_training_step_returned(parts: int):
    """Lightning hands `on_before_backward` the loss divided by the number of parts."""
    callback = Judged(clip=None)
    torch.manual_seed(0)
    module = Regression(rate=0.0)
    fit(callback, module, accumulate_grad_batches=parts)
    rows = list(DataLoader(data(), batch_size=8))
    losses = [float(module.loss(batch)) for batch in rows]
    windows = [losses[i : i + parts] for i in range(0, len(losses), parts)]
    assert callback.losses == pytest.approx([sum(w) / len(w) for w in windows], rel=1e-6)


def test_each_network_of_a_gan_is_judged_by_its_own_loss():
    torch.manual_seed(0)
    module = Gan()
    losses: dict[str, list[float]] = {"optimizer0": [], "optimizer1": []}
    callback = LightningHealingCallback(clip=None)

    class Keep(importlib.import_module("lightning").Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            for name, healing in callback.healings.items():
                losses[name].append(float(healing.metrics()["heal/loss"]))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            passed.append(float(loss))

    passed: list[float] = []
    running = trainer(callback, Keep(), max_epochs=1)
    running.fit(module, DataLoader(data(), batch_size=8))
    assert losses["optimizer0"] == passed[0::2]
    assert losses["optimizer1"] == passed[1::2]


# -- the Trainer's own clipping -------------------------------------------------------------------


def test_the_norm_is_seen_before_clipping_and_the_limit_is_kept():
    callback = Judged()
    torch.manual_seed(0)
    module = Regression(rate=1.0)
    before = [p.detach().clone() for p in module.parameters()]
    _, running = fit(callback, module, gradient_clip_val=0.1, limit_train_batches=1)
    (healing,) = callback.healings.values()
    assert float(healing.metrics()["heal/grad_norm"]) > 0.5
    moved = sum((p - q).square().sum() for p, q in zip(module.parameters(), before, strict=True))
    assert float(moved) ** 0.5 == pytest.approx(0.1, rel=1e-4)
    assert running.gradient_clip_val == 0.1, "put back after the fit"


@pytest.mark.parametrize("kind", ["fixed", "autoclip", "none"])
def test_of_two_limits_the_smaller_holds(kind: str):
    clip = {"kind": kind} | ({} if kind == "none" else {"max_norm": 5.0})
    callback = LightningHealingCallback(clip=clip)
    fit(callback, gradient_clip_val=0.1, limit_train_batches=1)
    (healing,) = callback.healings.values()
    decision = healing.last_decision()
    assert decision is not None
    norm = float(healing.metrics()["heal/grad_norm"])
    assert decision.grad_scale == pytest.approx(0.1 / norm, rel=1e-4)


# -- options --------------------------------------------------------------------------------------


def test_fast_dev_run_leaves_nothing_behind(tmp_path: Any):
    callback = LightningHealingCallback(store=tmp_path / "store")
    fit(callback, fast_dev_run=True)
    assert callback.healer is None
    assert not (tmp_path / "store").exists()


def test_after_the_fit_nothing_is_left_on_trainer_and_optimizer():
    callback = LightningHealingCallback()
    _, running = fit(callback)
    (optimizer,) = running.optimizers
    assert not optimizer._optimizer_step_pre_hooks
    assert "on_advance_end" not in vars(running.fit_loop.epoch_loop)


# -- the cost -------------------------------------------------------------------------------------


class Counting(Regression):
    """Counts what reads a tensor on the host, apart from its own reading of the inputs."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)


def test_the_callback_itself_reads_nothing_on_the_host(tmp_path: Path):
    """Whatever the engine reads is in `Report.syncs_per_step`; hooks and metrics add nothing."""
    logs: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}

    def syncs(callback: Any) -> int:
        torch.manual_seed(0)
        with CountSyncs() as counted:
            fit(callback, Counting(), accumulate_grad_batches=2, **logs)
        return counted.count

    callback = LightningHealingCallback()
    added = syncs(callback) - syncs(None)
    (healing,) = callback.healings.values()
    assert healing.report().syncs_per_step == 0
    assert added == 0


def test_state_survives_lightnings_checkpoint(tmp_path: Any):
    callback = LightningHealingCallback()
    _, running = fit(callback, rows=data(bad=3))
    (first,) = callback.healings.values()
    callback_2 = LightningHealingCallback()
    running.save_checkpoint(tmp_path / "last.ckpt")
    fit(callback_2, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    (second,) = callback_2.healings.values()
    assert int(second.live_engine.state.step) == 16
    assert int(second.metrics()["heal/skips"]) == int(first.metrics()["heal/skips"]) == 1
