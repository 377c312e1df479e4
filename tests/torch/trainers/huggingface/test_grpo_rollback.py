"""A rollback inside a GRPO run: completions of damaged weights are dropped and generated again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback

from healcore import Checkpoints
from healcore.torch import heal_trainer
from tests.torch.trainers.huggingface import tiny_trainers as tiny

AT = 6
"""The step that begins with damaged weights: with two steps per generation one that generates."""


class Damage(TrainerCallback):
    """Doubles a weight once, and makes its gradient NaN in that step, as a faulty device does."""

    def __init__(self, trainer: Any) -> None:
        self.hook: Any = None
        self.trainer, self.done, self.rewarded = trainer, False, []
        self._reward = trainer.reward_funcs[0]
        trainer.reward_funcs[0] = self.reward

    def reward(self, completions: list[str], **given: Any) -> list[float | None]:
        self.rewarded.append(self.trainer.state.global_step)
        return self._reward(completions, **given)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == AT and not self.done:
            self.done = True
            weight = next(kwargs["model"].parameters())
            self.hook = weight.register_hook(lambda gradient: gradient * math.nan)
            with torch.no_grad():
                weight.mul_(2)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.hook is not None:
            self.hook.remove()


def test_generation_goes_on_after_a_rollback(tmp_path: Path):
    trainer = tiny.grpo(tmp_path, max_steps=12, steps_per_generation=2)
    before = float(tiny.weights(trainer).abs().max())
    steps, damage = tiny.Steps(), Damage(trainer)
    for each in (damage, steps):
        trainer.add_callback(each)
    healed: Any = heal_trainer(
        trainer,
        store=tmp_path / "store",
        checkpoints=Checkpoints(every=2),
        rollback={"probation": 2, "confirm": False},
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
    )
    healed.train()
    assert healed.healer.rollbacks == 1
    (back,) = steps.returns
    first = steps.steps[back]
    assert first <= AT
    assert steps.steps[back:] == list(range(first, 13))
    assert damage.rewarded.count(first - 1) == 2, "the completions of that step came once more"
    assert float(tiny.weights(trainer).abs().max()) < 1.5 * before
    assert trainer.state.global_step == 12
