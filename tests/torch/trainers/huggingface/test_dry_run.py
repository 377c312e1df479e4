"""`dry_run` trains a copy: the trainer and the disk are bit-identical afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from healcore.torch import HealingCallback, heal_trainer
from tests.torch.trainers.huggingface import tiny_trainers as tiny


class Called(TrainerCallback):
    calls = 0

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.calls += 1


def random_states() -> list[Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("kind", ["plain", "sft", "dpo", "grpo"])
def test_it_leaves_no_trace(kind: str, tmp_path: Path):
    folder = tmp_path / "out"
    trainer = getattr(tiny, kind)(folder, max_steps=6, save_strategy="steps", save_steps=1)
    callback = Called()
    trainer.add_callback(callback)
    healed: Any = heal_trainer(trainer)

    def facts() -> Any:
        return random_states(), repr(trainer.state), trainer.args.to_json_string()

    weights, before = tiny.weights(trainer), facts()
    found = healed.dry_run(steps=2)
    assert torch.equal(weights, tiny.weights(trainer))
    assert facts() == before
    assert trainer.optimizer is None
    assert callback.calls == 0
    assert not folder.exists() or not list(folder.rglob("*"))
    assert len(found.losses) == len(found.grad_norms) == 2
    assert found.finite
    # And it was these steps: a run has the same first losses.
    trainer.args.save_strategy = "no"
    healed.train()
    losses = tiny.logged(trainer, "loss")
    if kind != "grpo":
        assert found.losses == pytest.approx(losses[:2], rel=1e-4)


def test_a_trainer_with_methods_of_its_own(tmp_path: Path):
    """A callback's guard around `train`, and a method that the user has replaced."""
    trainer = tiny.plain(tmp_path, max_steps=3)
    trainer.add_callback(HealingCallback())
    trainer.callback_handler.on_init_end(trainer.args, trainer.state, trainer.control)
    trainer.train()
    trainer.remove_callback(HealingCallback)
    trainer.compute_loss = trainer.compute_loss
    before = tiny.weights(trainer)
    assert len(heal_trainer(trainer).dry_run(steps=2).losses) == 2
    assert torch.equal(before, tiny.weights(trainer))
    assert trainer.state.global_step == 3


def test_a_trainer_that_has_an_optimizer(tmp_path: Path):
    """Also one that has trained before, whose optimizer has moments."""
    trainer = tiny.plain(tmp_path, max_steps=3)
    trainer.train()
    state = trainer.optimizer.state_dict()
    before = [value["exp_avg"].clone() for value in state["state"].values()]
    weights = tiny.weights(trainer)
    heal_trainer(trainer).dry_run(steps=2)
    after = [value["exp_avg"] for value in trainer.optimizer.state_dict()["state"].values()]
    assert all(map(torch.equal, before, after))
    assert torch.equal(weights, tiny.weights(trainer))


def test_it_says_what_the_policy_would_do(tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=3)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    found = heal_trainer(trainer).dry_run(steps=2)
    assert not found.finite
    assert all("NONFINITE_LOSS" in each for each in found.would)


def test_an_error_in_it_has_a_note_about_what_to_look_at(tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=3)
    trainer.model.lm_head.register_forward_hook(lambda *_: torch.empty(1 << 50))
    with pytest.raises(RuntimeError, match="alloc") as raised:
        heal_trainer(trainer).dry_run(steps=1)
    assert "Memory ran out: " in raised.value.__notes__[-1]


def test_steps_is_checked(tmp_path: Path):
    with pytest.raises(ValueError, match="whole number >= 1, not 0"):
        heal_trainer(tiny.plain(tmp_path)).dry_run(steps=0)
