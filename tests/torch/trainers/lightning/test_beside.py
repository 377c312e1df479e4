"""Lightning's own checkpoints beside the callback: only one of the two resumes a run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore.torch import AttachError, LightningHealingCallback
from tests.torch.trainers.lightning.fits import Regression, data, trainer


def fit(
    *callbacks: Any, kind: Any = StatefulDataLoader, ckpt_path: Any = None, **options: Any
) -> tuple[Regression, Any]:
    torch.manual_seed(0)
    module = Regression(warmup=20)
    running = trainer(*callbacks, **{"max_epochs": 3, **options})
    loader = kind(data(), batch_size=8, shuffle=True)
    running.fit(module, loader, DataLoader(data(2), 8), ckpt_path=ckpt_path)
    return module, running


def checkpoints(folder: Any) -> ModelCheckpoint:
    return ModelCheckpoint(
        folder, filename="{step}", every_n_train_steps=5, save_top_k=-1, save_last=True
    )


@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
@pytest.mark.parametrize("at", [5, 10, 16])
def test_a_callback_without_a_store_begins_where_ckpt_path_leads(at: int, kind: Any, tmp_path: Any):
    """As Lightning resumes it, within an epoch and after one."""
    path = tmp_path / f"step={at}.ckpt"
    if at == 16:
        _, ended = fit(kind=kind, max_epochs=2)
        ended.save_checkpoint(path)
    else:
        fit(checkpoints(tmp_path), kind=kind, enable_checkpointing=True)
    plain, running = fit(kind=kind, ckpt_path=path)
    module, resumed = fit(LightningHealingCallback(clip=None), kind=kind, ckpt_path=path)
    assert resumed.global_step == running.global_step == 24
    assert resumed.current_epoch == running.current_epoch == 3
    assert module.seen == plain.seen
    assert all(map(torch.equal, plain.parameters(), module.parameters()))


def test_two_sources_are_refused(tmp_path: Any):
    fit(max_epochs=1)[1].save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(AttachError, match="ckpt_path conflicts with the store"):
        fit(LightningHealingCallback(store=tmp_path / "store"), ckpt_path=tmp_path / "last.ckpt")
