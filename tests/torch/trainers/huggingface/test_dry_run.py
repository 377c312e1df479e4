"""`dry_run` trains a copy: the trainer and the disk are bit-identical afterwards."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from healcore.torch import heal_trainer
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling


def random_states() -> list[Any]:
    numpy: Any = np.random.get_state()  # noqa: NPY002
    return [random.getstate(), numpy[1].tolist(), numpy[2], torch.get_rng_state().tolist()]


@pytest.mark.parametrize("kind", ["plain", "sft", "dpo", "grpo"])
def test_it_leaves_no_trace(kind: str, tmp_path: Path):
    folder = tmp_path / "out"
    trainer = getattr(tiny, kind)(folder, max_steps=6, save_strategy="steps", save_steps=1)
    called: list[Any] = []
    for event in ("on_step_end", "on_train_begin"):
        trainer.add_callback(calling(event, lambda state, **_: called.append(state)))
    healed: Any = heal_trainer(trainer)

    def facts() -> Any:
        return random_states(), repr(trainer.state), trainer.args.to_json_string()

    weights, before = tiny.weights(trainer), facts()
    found = healed.dry_run(steps=2)
    assert torch.equal(weights, tiny.weights(trainer))
    assert facts() == before
    assert trainer.optimizer is None
    assert not called
    assert not folder.exists() or not list(folder.rglob("*"))
    assert len(found.losses) == len(found.grad_norms) == 2
    assert found.finite
    # And it was these steps: a run has the same first losses.
    trainer.args.save_strategy = "no"
    healed.train()
    losses = tiny.logged(trainer, "loss")
    if kind != "grpo":
        assert found.losses == pytest.approx(losses[:2], rel=1e-4)


def test_it_says_what_the_policy_would_do(tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=3)
    with torch.no_grad():
        trainer.model.lm_head.weight[0, 0] = float("nan")
    found = heal_trainer(trainer).dry_run(steps=2)
    assert not found.finite
    assert all("NONFINITE_LOSS" in each for each in found.would)


@pytest.mark.parametrize(
    ("raises", "note"),
    [
        (lambda *_: torch.empty(1 << 50), "Memory ran out: "),
        (lambda *_: [].pop(), "token ids"),
        (lambda *_: {}["labels"], "columns"),
    ],
)
def test_an_error_in_it_has_a_note_about_what_to_look_at(raises: Any, note: str, tmp_path: Path):
    trainer = tiny.plain(tmp_path, max_steps=3)
    trainer.model.lm_head.register_forward_hook(raises)
    with pytest.raises((RuntimeError, IndexError, KeyError)) as raised:
        heal_trainer(trainer).dry_run(steps=1)
    assert note in raised.value.__notes__[-1]
