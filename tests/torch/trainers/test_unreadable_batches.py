"""A batch that cannot be read is skipped in every trainer, and the run completes."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints
from healcore.torch import LightningHealingCallback, heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.lightning import fits


def corrupt(rows: Any, bad: tuple[int, ...]) -> small_runs.Reading:
    """A data set of which the rows with these numbers cannot be read."""

    def read(index: int) -> None:
        if index in bad:
            raise OSError(f"row {index} is no image")

    return small_runs.Reading(rows, read)


def skipped(folder: Path) -> list[list[int]]:
    """The batches of the faults that were answered by a skip; no fault has another answer."""
    faults = events(folder, "fault")
    assert {each.get("answer") for each in faults} <= {"skip_batch"}
    return [batch for each in faults for batch in each["batches"]]


# -- Hugging Face ---------------------------------------------------------------------------------


def trained(folder: Path, bad: tuple[int, ...], **arguments: Any) -> Any:
    trainer = small_runs.trainer(folder, cls=small_runs.Recording, **arguments)
    rows = tuple(each * small_runs.BATCH + 1 for each in bad)
    trainer.train_dataset = corrupt(small_runs.Rows(8), rows)
    heal_trainer(trainer, store=folder / "store", checkpoints=Checkpoints(every=5)).train()
    return trainer


@pytest.mark.parametrize("workers", [0, 2])
def test_trainer(workers: int, tmp_path: Path):
    trainer = trained(
        tmp_path, (0, 3, 7), max_steps=12, dataloader_num_workers=workers, num_train_epochs=3
    )
    assert skipped(tmp_path / "store") == [[e, b] for e in (0, 1) for b in (0, 3, 7)] + [[2, 0]]
    assert [batch for _, batch in trainer.seen] == [1, 2, 4, 5, 6] * 2 + [1, 2]
    assert trainer.state.global_step == 12


@pytest.mark.parametrize("bad", [(1,), (5,), (6,), (7,), (6, 7)])
def test_trainer_under_accumulation(bad: tuple[int, ...], tmp_path: Path):
    """No gradient of one epoch is added to a step of the next one."""
    trainer = trained(tmp_path, bad, max_steps=5, gradient_accumulation_steps=3)
    steps: dict[int, list[int]] = {}
    for step, batch in trainer.seen:
        steps.setdefault(step, []).append(batch)
    good = [each for each in range(8) if each not in bad]
    windows = [good[i : i + 3] for i in range(0, len(good), 3)]
    assert list(steps.values()) == (windows * 3)[:5]


def test_a_restart_knows_the_skipped_batches(tmp_path: Path):
    """The batch was skipped after the step that was saved; its epoch is as short as before."""
    found = []
    stop = small_runs.calling("on_step_begin", small_runs.raising(ZeroDivisionError()), at=1)
    for name, callbacks in (("whole", []), ("broken", [stop]), ("broken", [])):
        with suppress(ZeroDivisionError):
            arguments = {"max_steps": 4, "gradient_accumulation_steps": 3, "callbacks": callbacks}
            found.append(trained(tmp_path / name, (5,), **arguments))
    whole, continued = found
    assert continued.seen == [each for each in whole.seen if each[0] >= 1]
    assert torch.equal(small_runs.weights(whole), small_runs.weights(continued))


# -- Lightning ------------------------------------------------------------------------------------


class Validated(fits.Regression):
    """Records the epochs that were validated."""

    def on_validation_epoch_end(self) -> None:
        vars(self).setdefault("validated", []).append(self.trainer.current_epoch)


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("bad", [(0, 3), (6, 7)])
def test_lightning(loader: Any, bad: tuple[int, ...], tmp_path: Path):
    rows = fits.data(8)
    module = Validated()
    trainer = fits.trainer(
        LightningHealingCallback(store=tmp_path),
        max_epochs=3,
        accumulate_grad_batches=2,
        num_sanity_val_steps=0,
    )
    damaged = corrupt(rows, tuple(each * 8 + 1 for each in bad))
    trainer.fit(module, loader(damaged, batch_size=8), DataLoader(rows, batch_size=8))
    numbers = {float(rows[i * 8 : i * 8 + 8][0].sum()): i for i in range(8)}
    order = [(each.epoch, numbers[each.inputs]) for each in module.seen]
    good = [each for each in range(8) if each not in bad]
    if 7 in bad:  # the first batch of the next epoch ends the epoch
        expected = [*good, 0], [*good[1:], 0], [*good[1:], 0]
    else:
        expected = good, good, good
    assert order == [(epoch, batch) for epoch in range(3) for batch in expected[epoch]]
    assert vars(module)["validated"] == [0, 1, 2]
    assert len(skipped(tmp_path)) == 6
    assert trainer.current_epoch == 3
