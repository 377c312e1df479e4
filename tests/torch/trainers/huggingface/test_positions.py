"""An exception within an accumulation: the run that is started again is the run without it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from healcore.torch import heal
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import InOrder, Rows, logged, trainer, weights
from tests.torch.trainers.huggingface.test_out_of_memory import limit


class Raising(InOrder):
    """A net with dropout; raises before the micro-batch of that number, from 0."""

    raises_at: int | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        net: Any = self.model
        net.layers.insert(1, torch.nn.Dropout(0.2))
        self.seen: list[float] = []

    def training_step(self, model: Any, inputs: Any, items: Any = None) -> Any:
        self.seen.append(float(inputs["x"].sum()))
        if len(self.seen) - 1 == self.raises_at:
            raise ZeroDivisionError
        return super().training_step(model, inputs, items)


def run(folder: Path, accumulated: int, raises_at: int | None = None) -> Raising:
    """Two epochs of 7 batches, so that the last window of an epoch may be a shorter one."""
    made = trainer(folder, cls=Raising, num_train_epochs=2, gradient_accumulation_steps=accumulated)
    made.train_dataset, made.raises_at = Rows(7), raises_at
    heal(made, store=folder / "store", save_every=2).train()
    return made


@pytest.mark.parametrize(("accumulated", "at"), [(3, 4), (3, 9), (2, 7)])
def test_after_an_exception_each_batch_is_used_by_one_step(
    accumulated: int, at: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    whole = run(tmp_path / "whole", accumulated)
    with pytest.raises(ZeroDivisionError):
        run(tmp_path / "broken", accumulated, at)
    again = run(tmp_path / "broken", accumulated)
    first = at - at % 7 % accumulated
    assert again.seen == whole.seen[first:]
    assert torch.equal(weights(again), weights(whole))
    assert (again.state.global_step, again.state.epoch) == (whole.state.global_step, 2.0)
    assert logged(again, "loss") == logged(whole, "loss")
    if at == 4:  # the other windows begin where a checkpoint is
        assert "come again after a restart" in capsys.readouterr().err


class Entries(TrainerCallback):
    """How many entries TRL's metric has after each step."""

    def __init__(self, trainer: Any) -> None:
        self.trainer, self.seen = trainer, []

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(len(self.trainer._metrics["train"]["mean_token_accuracy"]))


def test_a_window_that_is_done_again_is_counted_once(tmp_path: Path):
    made = tiny.sft(tmp_path, max_steps=2, gradient_accumulation_steps=3, logging_steps=1)
    entries = Entries(made)
    made.add_callback(entries)
    limit(made, 2)
    heal(made, store=tmp_path / "store").train()
    assert entries.seen == [6, 6]


def test_a_batch_that_cannot_be_split_is_trained_on_whole(tmp_path: Path):
    """Another batch before it has not fitted into memory."""

    class Odd(InOrder):
        batches = 0

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            odd = inputs.pop("odd", None)
            if odd is None and len(inputs["x"]) > 2:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            return super().compute_loss(model, inputs, *args, **kwargs)

    def collate(rows: list[Mapping[str, Any]]) -> dict[str, Any]:
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        Odd.batches += 1
        return batch if Odd.batches < 3 else {**batch, "odd": torch.zeros(3)}

    made = trainer(tmp_path, steps=4, cls=Odd)
    made.data_collator = collate
    healed = heal(made, store=tmp_path / "store")
    healed.train()
    assert made.state.global_step == 4
    assert healed.report().counts["shrinks"] == 1
