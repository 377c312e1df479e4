"""A failure in the network within a step or a read is repeated; the run ends with the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from healcore.torch import heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny

QUICK = {"base_delay_s": 0.01, "max_delay_s": 0.02}


class Failing:
    """Raises ConnectionResetError at some of its calls, which count from 0."""

    def __init__(self, at: tuple[int, ...]) -> None:
        self.at, self.calls = at, 0

    def __call__(self) -> None:
        self.calls += 1
        if self.calls - 1 in self.at:
            raise ConnectionResetError("the judge is gone")


def answers(folder: Path) -> list[str | None]:
    return [each.get("answer") for each in events(folder, "fault")]


class Dropped(small_runs.InOrder):
    """Draws a mask in each micro-batch, and asks `judge` after the backward pass."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs = {**inputs, "x": nn.functional.dropout(inputs["x"], 0.3)}
        loss = super().training_step(model, inputs, *args, **kwargs)
        vars(self)["judge"]()
        return loss


@pytest.mark.parametrize("at", [(), (0,), (4, 5), (7,)])
def test_a_step_of_a_trainer(at: tuple[int, ...], tmp_path: Path):
    """With the gradients and the random state of before the step, in its second micro-batch too."""
    found = []
    for own in ((), at):
        folder = tmp_path / str(len(found))
        trainer = small_runs.trainer(folder, steps=5, cls=Dropped, gradient_accumulation_steps=2)
        vars(trainer)["judge"] = Failing(own)
        heal_trainer(trainer, store=folder / "store", retry=QUICK).train()
        assert trainer.state.global_step == 5
        assert answers(folder / "store") == ["retry"] * len(own)
        found.append((small_runs.weights(trainer), small_runs.logged(trainer, "loss")))
    assert torch.equal(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_a_reward_function(tmp_path: Path):
    found = []
    for at in ((), (0, 2)):
        folder = tmp_path / str(at)
        trainer = tiny.grpo(folder, max_steps=4, num_iterations=2)
        judge, failing = trainer.reward_funcs[0], Failing(at)

        def reward(judge: Any = judge, failing: Failing = failing, **given: Any) -> Any:
            failing()
            return judge(**given)

        trainer.reward_funcs[0] = reward
        heal_trainer(trainer, store=folder / "store", retry=QUICK).train()
        assert answers(folder / "store") == ["retry"] * len(at)
        rows = [
            {name: value for name, value in row.items() if "time" not in name}
            for row in trainer.state.log_history[:-1]
        ]
        found.append((rows, tiny.weights(trainer)))
    assert found[0][0] == found[1][0]
    assert torch.equal(found[0][1], found[1][1])
