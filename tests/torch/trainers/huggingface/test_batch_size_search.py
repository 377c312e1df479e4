"""The Trainer's own search of a batch size, `auto_find_batch_size`."""

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments

from healcore import Checkpoints
from healcore.torch import heal_trainer


class SmallMemory(nn.Module):
    """Has memory for four samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, x: Any, labels: Any) -> Any:
        if len(x) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return {"loss": (self.layer(x).squeeze(-1) - labels).square().mean()}


def searched(folder: Path, *, heals: bool, stop: int | None = None) -> Any:
    """A Trainer that has searched its batch size from 7 on, and trained 40 steps or to `stop`."""

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == stop:
                raise KeyboardInterrupt

    torch.manual_seed(0)
    random = torch.Generator().manual_seed(1)
    rows: Any = [{"x": x, "labels": x.sum()} for x in torch.randn(80, 4, generator=random)]
    args = TrainingArguments(
        str(folder),
        num_train_epochs=2,
        per_device_train_batch_size=7,
        auto_find_batch_size=True,
        learning_rate=0.01,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(SmallMemory(), args, train_dataset=rows, callbacks=[Stop()])
    if heals:
        heal_trainer(trainer, checkpoints=Checkpoints(every=10))
    with contextlib.suppress(KeyboardInterrupt):
        trainer.train()
    return trainer


@pytest.mark.slow
def test_the_trainers_own_search_of_a_batch_size_goes_first(tmp_path: Path, capsys: Any):
    """`auto_find_batch_size` finds what it finds alone, and a restart continues with this size."""
    expected = searched(tmp_path / "plain", heals=False)
    found = searched(tmp_path / "healed", heals=True)
    assert found._train_batch_size == expected._train_batch_size == 4
    assert found.state.global_step == expected.state.global_step == 40
    assert_equal_weights(found.model, expected.model)
    lines = capsys.readouterr().err
    assert lines.count("memory ran out before the first step") == 3
    assert "does not fit into memory" not in lines
    searched(tmp_path / "stopped", heals=True, stop=25)
    capsys.readouterr()
    resumed = searched(tmp_path / "stopped", heals=True)
    assert "memory ran out" not in capsys.readouterr().err
    assert resumed.state.global_step == 40
    assert_equal_weights(resumed.model, expected.model)


def assert_equal_weights(a: nn.Module, b: nn.Module) -> None:
    for left, right in zip(a.parameters(), b.parameters(), strict=True):
        assert torch.equal(left, right)
