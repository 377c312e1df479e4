"""A rollback inside a GRPO run: completions of damaged weights are dropped and generated again."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch

from healcore import Checkpoints
from healcore.torch import heal_trainer
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling

AT = 6
"""The step that begins with damaged weights: with two steps per generation one that generates."""


def test_generation_goes_on_after_a_rollback(tmp_path: Path):
    trainer = tiny.grpo(tmp_path, max_steps=12, steps_per_generation=2)
    before = float(tiny.weights(trainer).abs().max())
    steps, rewarded, hooks = tiny.Steps(), list[int](), list[Any]()
    reward = trainer.reward_funcs[0]

    def noted(**given: Any) -> list[float | None]:
        rewarded.append(trainer.state.global_step)
        return reward(**given)

    def damage(state: Any, *, model: Any, **_: Any) -> None:
        """Doubles a weight once, and makes its gradient NaN in that step, as a faulty device."""
        if not hooks:
            weight = next(model.parameters())
            hooks.append(weight.register_hook(lambda gradient: gradient * math.nan))
            with torch.no_grad():
                weight.mul_(2)

    trainer.reward_funcs[0] = noted
    removed = lambda *_, **__: hooks and hooks[0].remove()  # noqa: E731
    for each in (calling("on_step_begin", damage, at=AT), calling("on_step_end", removed), steps):
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
    assert rewarded.count(first - 1) == 2, "the completions of that step came once more"
    assert float(tiny.weights(trainer).abs().max()) < 1.5 * before
    assert trainer.state.global_step == 12
