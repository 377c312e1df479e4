"""What the callback does in the step, and what it takes from Lightning's own options."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader

from healcore.core.verdict import Cause
from healcore.torch import LightningHealingCallback
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.lightning.fits import Regression, data, trainer, vector
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


def fit(
    callback: Any, module: Any = None, *, rows: Any = None, ckpt_path: Any = None, **options: Any
) -> tuple[Any, Any]:
    torch.manual_seed(0)
    module = module or Regression()
    running = trainer(*([callback] if callback else []), **{"max_epochs": 1, **options})
    running.fit(module, DataLoader(rows or data(), batch_size=8), ckpt_path=ckpt_path)
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
    losses: dict[str, list[float]] = {"optimizer0": [], "optimizer1": []}
    passed: list[float] = []
    callback = LightningHealingCallback(clip=None)

    class Keep(lightning.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            for name, healing in callback.healings.items():
                losses[name].append(float(healing.metrics()["heal/loss"]))

        def on_before_backward(self, trainer: Any, pl_module: Any, loss: Any) -> None:
            passed.append(float(loss))

    trainer(callback, Keep(), max_epochs=1).fit(Gan(), DataLoader(data(), batch_size=8))
    assert losses == {"optimizer0": passed[0::2], "optimizer1": passed[1::2]}


# -- the Trainer's own clipping -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [None, "none", "fixed", "autoclip"])
def test_the_norm_is_seen_before_clipping_and_the_smaller_limit_is_kept(kind: str | None):
    clip = {"kind": kind} | ({"max_norm": 5.0} if kind in ("fixed", "autoclip") else {})
    callback = LightningHealingCallback(**({"clip": clip} if kind else {}))
    module = Regression(rate=1.0)
    before = vector(module)
    _, running = fit(callback, module, gradient_clip_val=0.1, limit_train_batches=1)
    (healing,) = callback.healings.values()
    assert float(healing.metrics()["heal/grad_norm"]) > 0.5
    assert float((vector(module) - before).norm()) == pytest.approx(0.1, rel=1e-4)
    assert running.gradient_clip_val == 0.1, "put back after the fit"


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


class Counting(Regression):
    """Does not read its inputs on the host, as `Regression` does."""

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
