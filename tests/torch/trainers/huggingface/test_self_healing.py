"""`heal(trainer)` goes back inside a running `train()`, on the real trainers."""

from __future__ import annotations

import math
import signal
from collections import Counter
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from healcore import Checkpoints
from healcore.torch import AttachError, heal_trainer
from tests import forked_programs
from tests.forked_programs import TRANSFORMERS
from tests.healer.run_options import grouped
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling

DIVERGES = {
    "optim": "sgd",
    "learning_rate": 30.0,
    "warmup_steps": 80,
    "max_steps": 50,
    "lr_scheduler_type": "constant_with_warmup",
    "max_grad_norm": 0.0,
}
OFTEN = {"save_every": 5, "rollback": {"probation": 10}}
KINDS = ["plain", "sft", "dpo", "grpo"]


@pytest.mark.parametrize("kind", ["plain", "sft"])
def test_a_divergence_is_rolled_back_in_place(kind: str, tmp_path: Path):
    trainer = getattr(tiny, kind)(tmp_path, **DIVERGES)
    steps, scales = tiny.Steps(), list[float]()

    def applied(*_: Any, **__: Any) -> None:
        (healing,) = healed.healer._loop.driver.healings.values()
        scales.append(float(healing.last_decision().lr_scale))

    for each in (steps, calling("on_step_end", applied)):
        trainer.add_callback(each)
    healed: Any = heal_trainer(trainer, "pretraining", store=tmp_path / "store", **grouped(OFTEN))
    healed.train()
    # The steps go back, and on to the end that was planned.
    (back,) = steps.returns
    first, before = steps.steps[back], steps.steps[back - 1]
    assert 1 < first <= before
    assert steps.steps[back:] == list(range(first, 51))
    assert healed.healer.rollbacks == 1
    assert trainer.state.global_step == healed.healer.step == 50
    # The cut learning rate is effective at the next step: same weights, same batch, shorter step.
    earlier = steps.steps.index(first)
    assert steps.epochs[back] == steps.epochs[earlier]
    assert scales[back] < 0.9
    expected = steps.moved[earlier] * scales[back] / scales[earlier]
    assert steps.moved[back] == pytest.approx(expected, rel=1e-4)
    # The log has each step once, and the sums of the loss have gone back with it.
    logged = [row["step"] for row in trainer.state.log_history if "loss" in row]
    assert logged == list(range(1, 51))
    losses = tiny.logged(trainer, "loss")
    assert trainer.state.log_history[-1]["train_loss"] == pytest.approx(sum(losses) / 50, rel=1e-4)
    # Without healing the same run is lost.
    alone = getattr(tiny, kind)(tmp_path, **DIVERGES)
    alone.train()
    assert torch.isfinite(tiny.weights(trainer)).all()
    assert not torch.isfinite(tiny.weights(alone)).all()


@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_run_is_bit_identical(kind: str, tmp_path: Path):
    arguments: dict[str, Any] = {"max_steps": 20}
    if kind in ("plain", "sft"):
        arguments |= {"max_steps": -1, "num_train_epochs": 2, "gradient_accumulation_steps": 3}
    alone = getattr(tiny, kind)(tmp_path, **arguments)
    alone.train()
    trainer = getattr(tiny, kind)(tmp_path, **arguments)
    healed: Any = heal_trainer(trainer, store=tmp_path / "store", clip=None, **grouped(OFTEN))
    healed.train()
    assert torch.equal(tiny.weights(trainer), tiny.weights(alone))
    assert trainer.state.epoch == alone.state.epoch
    assert trainer.state.global_step == alone.state.global_step == healed.healer.step
    left_out = ("runtime", "per_second", "step_time", "heal/")
    for state in (trainer.state, alone.state):
        for row in state.log_history:
            for name in [name for name in row if any(part in name for part in left_out)]:
                del row[name]
    assert trainer.state.log_history == alone.state.log_history


def test_epochs_workers_and_evaluation(tmp_path: Path):
    """A rollback over the end of an epoch, into one that an evaluation has closed."""
    length = {"max_steps": -1, "num_train_epochs": 3, "gradient_accumulation_steps": 2}
    saves = {"eval_strategy": "epoch", "save_strategy": "epoch", "dataloader_num_workers": 2}
    rate = {"warmup_steps": 24, "learning_rate": 40.0}
    trainer = tiny.plain(tmp_path / "out", **{**DIVERGES, **length, **saves, **rate})
    steps = tiny.Steps()
    trainer.add_callback(steps)
    healed: Any = heal_trainer(
        trainer, "pretraining", store=tmp_path / "store", clip=None, **grouped(OFTEN)
    )
    healed.train()
    assert steps.returns
    assert trainer.state.global_step == trainer.state.max_steps == 24
    evaluated = [row["step"] for row in trainer.state.log_history if "eval_loss" in row]
    # An epoch is shorter by the batches of the trouble; others come instead, in a fourth epoch.
    skipped = Counter(epoch for epoch, *_ in healed.healer.report().skipped_batches)
    assert skipped
    ends = accumulate(math.ceil((16 - skipped[epoch]) / 2) for epoch in range(3))
    assert evaluated == [*ends, 24]
    assert {each.name for each in (tmp_path / "out").glob("checkpoint-*")} == {
        f"checkpoint-{step}" for step in evaluated
    }
    assert 3.0 < trainer.state.epoch < 4.0


SCRIPT = """
import os, sys, torch
from pathlib import Path
from transformers import TrainerCallback
from healcore import Checkpoints
from healcore.torch import heal_trainer
from tests.healer.run_directory import new_process
from tests.torch.trainers.huggingface import tiny_trainers as tiny

def run(folder, kill_at):
    trainer = getattr(tiny, kind)(folder, max_steps=24, gradient_accumulation_steps=2)
    steps = tiny.Steps()
    class Kill(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == kill_at: os.kill(os.getpid(), 9)
    for each in (steps, Kill()): trainer.add_callback(each)
    heal_trainer(trainer, store=folder / "store", checkpoints=Checkpoints(every=5)).train()
    logged = [row["step"] for row in trainer.state.log_history if "loss" in row]
    return tiny.weights(trainer), steps.steps, logged

folder, kind, kill_at = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
ends = [run(folder / "killed", kill_at)]
new_process()
ends += [run(folder / "killed", -1), run(folder / "whole", -1)]
torch.save(ends, folder / "ends.pt")
"""


@pytest.mark.parametrize(
    "kind", ["sft", *(pytest.param(k, marks=pytest.mark.stress) for k in ("plain", "dpo", "grpo"))]
)
def test_killed_and_started_again(kind: str, tmp_path: Path):
    """After kill -9 the same command ends with the weights of a run without interruption."""

    def run(kill_at: int) -> int:
        command = ["-c", SCRIPT, tmp_path, kind, kill_at]
        return forked_programs.run(*command, imports=TRANSFORMERS).returncode

    assert run(19) == -signal.SIGKILL
    assert run(-1) == 0
    (weights, steps, logged), again, whole = torch.load(tmp_path / "ends.pt")
    assert 1 < steps[0] <= 19
    assert steps[-1] == 24
    assert logged == list(range(1, 25))
    assert torch.equal(weights, whole[0])
    # Once more, after it has completed: nothing is trained, and the program goes on.
    assert again[1] == []
    assert torch.equal(again[0], weights)


def test_what_cannot_be_healed_is_refused_in_words(tmp_path: Path):
    with pytest.raises(AttachError, match=r"takes a transformers\.Trainer"):
        heal_trainer(torch.nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(AttachError, match="hyperparameter_search"):
        heal_trainer(tiny.plain(tmp_path)).train(trial={"learning_rate": 0.1})
    tiny.plain(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    with pytest.raises(AttachError, match="resume_from_checkpoint conflicts"):
        heal_trainer(tiny.plain(tmp_path)).train(resume_from_checkpoint=True)
    with pytest.raises(ValueError, match="every is a whole number"):
        heal_trainer(tiny.plain(tmp_path), checkpoints=Checkpoints(every=0))
    assert not (tmp_path / "_healcore").exists()
