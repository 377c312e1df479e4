"""What a self-healing trainer in use elsewhere gets wrong, held against the real libraries.

Its other failures are tested where the subject is: the rollback that is only a sentence and always
names step 0, and the halved learning rate that is never effective, in `test_self_healing`; the
halved batch that doubles the effective one, and the crash at an out-of-memory before the first
save, in `test_out_of_memory`; the dry run that trains the real model in `test_dry_run`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback
from trl import SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

from healcore.torch import AttachError, heal
from tests.torch.trainers.huggingface import tiny_trainers as tiny


class OneNaN(SFTTrainer):
    """The loss of one step is NaN."""

    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        loss = super().compute_loss(*args, **kwargs)
        return loss * float("nan") if self.state.global_step == 20 else loss


def test_a_nan_is_noticed_under_the_default_arguments(tmp_path: Path):
    """`logging_nan_inf_filter` shows it nowhere; the weights are finite and the run completes."""
    trainer, steps = tiny.sft(tmp_path, cls=OneNaN), tiny.Steps()
    trainer.add_callback(steps)
    healed: Any = heal(trainer, store=tmp_path / "store")
    healed.train()
    assert [i for i, moved in enumerate(steps.moved) if moved == 0] == [20]
    report = healed.report()
    assert report.counts["NONFINITE_LOSS"] == report.counts["skips"] == 1
    assert report.converged
    assert report.attempts == 0
    # Within noise of the run without it.
    alone = tiny.sft(tmp_path)
    alone.train()
    rows = [row for row in trainer.state.log_history if "loss" in row]
    # A row is written before the loop asks for a batch, and a step is read one step later.
    counted = [(i, row["heal/skips"]) for i, row in enumerate(rows) if "heal/skips" in row]
    assert counted == [(22, 1.0)]
    losses = [sum(tiny.logged(of, "loss")[-10:]) for of in (trainer, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=0.1)


class Poison(TrainerCallback):
    """At one step the weights become NaN, and two steps later the process ends."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 12:
            with torch.no_grad():
                next(iter(kwargs["model"].parameters())).fill_(float("nan"))
        if state.global_step == 14:
            raise ConnectionResetError("the machine is gone")


def test_checkpoints_with_nan_are_never_resumed_from(tmp_path: Path):
    """Saved at every step, also while the weights are NaN."""
    trainer = tiny.sft(tmp_path, save_strategy="steps", save_steps=1)
    trainer.add_callback(Poison())
    healed: Any = heal(trainer, store=tmp_path / "store", save_every=1)
    with pytest.raises(ConnectionResetError):
        healed.train()
    again, steps = tiny.sft(tmp_path, save_strategy="steps", save_steps=1), tiny.Steps()
    again.add_callback(steps)
    healed: Any = heal(again, store=tmp_path / "store", save_every=1)
    healed.train()
    assert 1 < steps.steps[0] <= 13
    assert steps.steps[-1] == 40
    assert torch.isfinite(tiny.weights(again)).all()
    assert healed.report().converged


class Failing(SFTTrainer):
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        if self.state.global_step == 3:
            raise KeyError("the user's")
        return super().compute_loss(*args, **kwargs)


def test_success_does_not_overwrite_the_postmortem(tmp_path: Path):
    healed: Any = heal(tiny.sft(tmp_path, max_steps=6, cls=Failing), store=tmp_path / "store")
    with pytest.raises(AttachError, match="before train"):
        healed.report()
    with pytest.raises(KeyError):
        healed.train()
    first = healed.report()
    assert first.ending == "exception"
    assert not first.converged
    assert first.postmortem
    told = first.postmortem.read_text()
    assert "the user's" in json.loads(told)["exception"]
    healed: Any = heal(tiny.sft(tmp_path, max_steps=6), store=tmp_path / "store")
    healed.train()
    second = healed.report()
    assert second.converged
    assert second.steps == 6
    assert second.postmortem not in (None, first.postmortem)
    assert first.postmortem.read_text() == told
    assert "completed at step 6" in str(second)
