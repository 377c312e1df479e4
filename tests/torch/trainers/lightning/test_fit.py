"""A healthy fit has the same bits, also if it is resumed; bad batches; what is left afterwards."""

import csv
import logging
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning
import pytest
import torch
from lightning.pytorch import callbacks as given
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.core.decision import Cause
from healcore.runtime.run.start import StoreNotEmpty
from healcore.torch import LightningHealingCallback
from healcore.torch.trainers.hook import newest_step
from tests.healer.run_directory import new_process
from tests.healer.run_options import grouped
from tests.torch.sync_counter import CountSyncs
from tests.torch.trainers.lightning.fits import (
    Gan,
    Regression,
    average,
    data,
    fit,
    shuffled,
    swa,
    vector,
)

OPTIONS = {"clip": None, "save_every": 3}


class Stream(IterableDataset):
    """A data set without a length; with `once` one that can be read only once, as a socket."""

    def __init__(self, *, once: bool = False) -> None:
        self.rows = iter(self) if once else None

    def __iter__(self) -> Iterator[Any]:
        rows = data()
        return vars(self).get("rows") or (rows[i] for i in range(len(rows)))


class Reloaded(Regression):
    def train_dataloader(self) -> Any:
        return shuffled(batches=3 + self.trainer.current_epoch)  # type: ignore[union-attr]


class Searching(Regression):
    batch_size = 4  # searched before the fit, without the callback

    def train_dataloader(self) -> Any:
        return DataLoader(data(), self.batch_size, shuffle=True)

    val_dataloader = train_dataloader

    def configure_callbacks(self) -> Any:
        rate = given.LearningRateFinder(1e-3, 3.0, 30, early_stop_threshold=None, attr_name="rate")
        return [rate, given.BatchSizeFinder(max_trials=1)]


class Short(Regression):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 5 else None  # Lightning then skips the rest of the epoch


class Several(Regression):
    """Takes its batches from two loaders of different lengths."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch["a"], batch_idx) + self.loss(batch["b"])


def iterable(**options: Any) -> Any:
    return DataLoader(Stream(**options), 8)


BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


PAIRS = {"accumulate_grad_batches": 2}


CASES: dict[str, Any] = {
    "manual": (Gan, lambda: [shuffled(StatefulDataLoader)], {}),
    "accumulated": (Regression, lambda: [shuffled()], {"accumulate_grad_batches": 3, **BY_VALUE}),
    "max_steps": (Regression, lambda: [shuffled()], {"max_steps": 13, "max_epochs": -1}),
    "short": (Short, lambda: [shuffled()], {}),
    "searching": (Searching, list, {"gradient_clip_val": 0.3}),
    "validated": (Regression, lambda: [shuffled(), shuffled()], {"val_check_interval": 3}),
    "iterable": (Regression, lambda: [iterable(), shuffled()], {}),
    "read once": (Regression, lambda: [iterable(once=True)], {}),
    "limited": (Regression, lambda: [iterable()], {"limit_train_batches": 5, **PAIRS}),
    "reloaded": (Reloaded, list, {"reload_dataloaders_every_n_epochs": 1}),
    "reloaded at 2": (partial(Reloaded, warmup=9), list, {"reload_dataloaders_every_n_epochs": 2}),
    "several": (Several, lambda: [{"a": shuffled(), "b": shuffled(batches=3)}], {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_healthy_fit_has_the_same_bits_as_without_healcore(case: str, tmp_path: Path):
    module, loaders, options = CASES[case]
    options = {"make": module, "loaders": loaders, "max_epochs": 3, **options}
    options["default_root_dir"] = tmp_path
    plain, running = fit(**options)
    callback = LightningHealingCallback(**grouped(OPTIONS))
    healed, healing = fit(callback, **options)
    assert healed.seen == plain.seen
    assert all(map(torch.equal, plain.parameters(), healed.parameters()))
    for name in ("global_step", "current_epoch", "callback_metrics"):
        assert getattr(running, name) == getattr(healing, name), name
    ours, theirs = healing.fit_loop.state_dict(), running.fit_loop.state_dict()
    ours["state_dict"] = theirs["state_dict"]  # of the loaders
    assert ours == theirs, "all of Lightning's counters"
    taken = [int(each.live_engine.state.step) for each in callback.healings.values()]
    assert sum(taken) == running.global_step, "every step was judged"


window = partial(given.GradientAccumulationScheduler, {0: 2, 1: 1})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("hook", "at", "begins", "ends", "other", "case"),
    [
        ("on_train_batch_end", 16, 2, (3, 4), window, "iterable"),
        ("on_validation_end", 16, 1, (3, 4), average, "iterable"),
        ("on_train_epoch_end", 16, 1, (3, 4), average, "iterable"),
        ("on_train_batch_end", 5, 1, (3,), average, "reloaded"),
        ("on_train_batch_end", 13, 3, (4,), swa, "reloaded at 2"),
    ],
)
def test_a_resumed_fit_ends_as_the_whole_fit(hook, at, begins, ends, other, case, tmp_path: Path):
    """The hook that raised comes again, also with `ckpt_path`. The fit continues after its end."""
    steps: list[int] = []
    epochs: list[int] = []
    own = lightning.Callback()
    own.on_train_epoch_start = lambda trainer, pl_module: epochs.append(trainer.current_epoch)
    options: Any = dict(zip(("make", "loaders"), CASES[case], strict=False)) | CASES[case][2]
    options |= {"enable_checkpointing": True, "ckpt_path": "last"}

    def call(trainer: Any, *args: Any) -> None:
        steps.append(trainer.global_step)
        if steps.count(at) == 2 and steps[-1] == at:
            raise ZeroDivisionError

    def run(store: str, number: int) -> Any:
        new_process()
        saves = given.ModelCheckpoint(tmp_path / store, every_n_train_steps=2, save_last=True)
        callback = LightningHealingCallback(store=tmp_path / store, **grouped(OPTIONS))
        return vector(fit(own, other(), callback, saves, max_epochs=number, **options)[0])

    setattr(own, hook, call)
    whole = run("whole", ends[-1])
    with pytest.raises(ZeroDivisionError):
        run("resumed", ends[0])
    epochs.clear()
    assert torch.equal(whole, [run("resumed", number) for number in ends][-1])
    assert epochs == [*range(begins, ends[-1])]
    assert steps.count(at) == 3


class Judged(LightningHealingCallback):
    """Keeps the decisions and the losses of all steps, by optimizer."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.decisions = defaultdict[str, list[Any]](list)
        self.losses = defaultdict(list)

    def on_train_batch_end(self, *args: Any) -> None:
        for name, healing in self.healings.items():
            if healing.live_engine.state.step > len(self.decisions[name]):
                self.decisions[name].append(healing.last_decision())
                self.losses[name].append(float(healing.metrics()["heal/loss"]))


def with_nan() -> Any:
    return [DataLoader(data(bad=3), 8)]


def test_one_bad_batch_is_noticed_in_its_step(tmp_path: Path):
    callback = Judged()
    logs = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    module, running = fit(callback, loaders=with_nan, max_epochs=2, **logs)
    (decisions,) = callback.decisions.values()
    causes = [bool(each.cause & Cause.NONFINITE_LOSS) for each in decisions]
    assert [i for i, bad in enumerate(causes) if bad] == [3, 11]
    assert [each.skip for each in decisions] == causes
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
    module, _ = fit(callback, make=lambda: Regression(rate=0.0), accumulate_grad_batches=parts)
    rows = list(DataLoader(data(), batch_size=8))
    losses = [float(module.loss(batch)) for batch in rows]
    windows = [losses[i : i + parts] for i in range(0, len(losses), parts)]
    (found,) = callback.losses.values()
    assert found == pytest.approx([sum(w) / len(w) for w in windows], rel=1e-6)


def test_each_network_of_a_gan_is_judged_by_its_own_loss():
    callback = Judged(clip=None)
    keep = lightning.Callback()
    passed: list[float] = []
    keep.on_before_backward = lambda trainer, pl_module, loss: passed.append(float(loss))
    fit(callback, keep, make=Gan)
    assert callback.losses == {"optimizer0": passed[0::2], "optimizer1": passed[1::2]}


@pytest.mark.parametrize("kind", [None, "none", "fixed", "autoclip"])
def test_the_norm_is_seen_before_clipping_and_the_smaller_limit_is_kept(kind: str | None):
    clip = {"kind": kind} | ({"max_norm": 5.0} if kind in ("fixed", "autoclip") else {})
    callback = LightningHealingCallback(**({"clip": clip} if kind else {}))
    module = Regression(rate=1.0)
    before = vector(module)
    options = {"gradient_clip_val": 0.1, "limit_train_batches": 1}
    _, running = fit(callback, make=lambda: module, **options)
    (healing,) = callback.healings.values()
    assert float(healing.metrics()["heal/grad_norm"]) > 0.5
    assert float((vector(module) - before).norm()) == pytest.approx(0.1, rel=1e-4)
    assert running.gradient_clip_val == 0.1, "put back after the fit"


def test_after_the_fit_nothing_is_left_on_trainer_and_optimizer(tmp_path: Any):
    """Nor on the disk, after fast_dev_run."""
    callback = LightningHealingCallback(store=tmp_path / "store")
    _, running = fit(callback, fast_dev_run=True)
    assert callback.healer is None
    assert not (tmp_path / "store").exists()
    _, running = fit(LightningHealingCallback())
    (optimizer,) = running.optimizers
    assert not optimizer._optimizer_step_pre_hooks
    assert "on_advance_end" not in vars(running.fit_loop.epoch_loop)


def test_the_callback_itself_reads_nothing_on_the_host(tmp_path: Path):
    """Hooks and metrics add no sync."""
    logs: dict[str, Any] = {"logger": CSVLogger(tmp_path), "log_every_n_steps": 1}
    counts = []
    for callbacks in ([], [LightningHealingCallback(loss_fn=None)]):
        with CountSyncs() as counted:
            fit(*callbacks, accumulate_grad_batches=2, **logs)
        counts.append(counted.count)
    assert counts[0] == counts[1]


def test_state_survives_lightnings_checkpoint(tmp_path: Any):
    first, second = LightningHealingCallback(), LightningHealingCallback()
    _, running = fit(first, loaders=with_nan)
    running.save_checkpoint(tmp_path / "last.ckpt")
    fit(second, max_epochs=2, ckpt_path=tmp_path / "last.ckpt")
    (healing,) = second.healings.values()
    assert int(healing.live_engine.state.step) == 16
    assert int(healing.metrics()["heal/skips"]) == 1


@pytest.mark.parametrize(
    "steps",
    [(3, 7), pytest.param((3,), marks=pytest.mark.slow)],
    ids=["empty store, then ended early", "first checkpoint only"],
)
def test_ckpt_path_begins_a_run_that_the_store_does_not_have(steps, tmp_path: Path, caplog):
    """As in a program that passes "last" and was killed before the store had a trained step."""
    caplog.set_level(logging.INFO, "healcore")
    options: Any = {"loaders": lambda: [DataLoader(data(), 8)], "enable_checkpointing": True}
    options["default_root_dir"] = tmp_path

    def run(*callbacks: Any, ends: int = -1) -> Any:
        new_process()
        own: Any = lightning.Callback()

        def stop(trainer: Any, *_: Any) -> None:
            if trainer.global_step == ends:
                raise ZeroDivisionError

        own.on_train_batch_start = stop
        saves = given.ModelCheckpoint(tmp_path / "own", every_n_train_steps=2, save_last=True)
        with pytest.raises(ZeroDivisionError) if ends >= 0 else nullcontext():
            return fit(own, saves, *callbacks, max_epochs=2, ckpt_path="last", **options)[0]

    def healing(**options: Any) -> Any:
        return LightningHealingCallback(store=tmp_path / "store", **options)

    if len(steps) == 1:  # the store has the checkpoint of step 0
        run(healing(checkpoints=Checkpoints(every=50)), ends=0)
        assert newest_step(tmp_path / "store") == 0
    run(ends=steps[0])
    path = shutil.copy(tmp_path / "own" / "last.ckpt", tmp_path)
    plain = vector(fit(max_epochs=2, ckpt_path=path, **options)[0])  # as Lightning continues it
    module = run(
        healing(checkpoints=Checkpoints(every=2)), ends=steps[1] if len(steps) == 2 else -1
    )
    if module is not None:
        assert module.seen[0].step == 2
        assert torch.equal(vector(module), plain)
    module = run(healing())
    assert torch.equal(vector(module), plain)
    assert "the store continues the run exactly, from its step" in caplog.text


@pytest.mark.parametrize(
    ("at", "kind"), [(5, DataLoader), (10, StatefulDataLoader), (16, DataLoader)]
)
def test_a_callback_without_a_store_begins_where_ckpt_path_leads(at: int, kind: Any, tmp_path: Any):
    """Lightning itself resumes the run, within an epoch and after one."""

    def rows() -> list[Any]:
        return [kind(data(), batch_size=8, shuffle=True)]

    def run(*callbacks: Any, **options: Any) -> tuple[Any, Any]:
        options = {"make": lambda: Regression(warmup=20), "loaders": rows, **options}
        return fit(*callbacks, **{"max_epochs": 3, **options})

    path = tmp_path / f"step={at}.ckpt"
    if at == 16:
        run(max_epochs=2)[1].save_checkpoint(path)
    else:
        saves = given.ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=5, save_top_k=-1)
        run(saves, enable_checkpointing=True)
    plain, running = run(ckpt_path=path)
    module, resumed = run(LightningHealingCallback(clip=None), ckpt_path=path)
    assert resumed.global_step == running.global_step == 24
    assert resumed.current_epoch == running.current_epoch == 3
    assert module.seen == plain.seen
    assert all(map(torch.equal, plain.parameters(), module.parameters()))


def test_a_finished_cell_with_other_hyperparameters_does_not_return_the_old_model(tmp_path, caplog):
    def again(rate: float = 0.05, batch: int = 8, **options: Any) -> Regression:
        new_process()
        callback = LightningHealingCallback(store=tmp_path)

        def rows() -> list[Any]:
            return [DataLoader(data(), batch)]

        return fit(callback, make=lambda: Regression(rate), loaders=rows, **options)[0]

    again()
    caplog.set_level(logging.INFO, "healcore")
    caplog.clear()
    assert again().seen == []
    assert "completed earlier, at step 8: nothing was trained" in caplog.text
    with pytest.raises(StoreNotEmpty, match=r"optimizer\.lr: 0\.05 -> 0\.5"):
        again(rate=0.5)
    with pytest.raises(StoreNotEmpty, match=r"batch_size: 8 -> 16"):
        again(batch=16)
    assert len(again(max_epochs=2).seen) == 8
