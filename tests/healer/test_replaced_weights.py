"""A program that puts other weights into the model for a while, as for an evaluation.

If the run ends there, the other weights must not become the state from which the next start trains.
"""

import copy
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from healcore import Healer
from healcore.errors import Terminated
from tests.healer.run_directory import events, new_process
from tests.healer.training_loops import EVERY_5, same, with_answers


class LowRank(nn.Module):
    """A frozen layer with a trained correction of low rank, which `merge` adds to the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(4, 8).requires_grad_(False)
        self.a, self.b = nn.Linear(4, 2, bias=False), nn.Linear(2, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.b(self.a(x))

    def merge(self) -> None:
        self.base.weight.data += self.b.weight.data @ self.a.weight.data


class Training:
    """A model with an average of its weights, which a program uses for its evaluation."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(LowRank(), nn.Tanh(), nn.Linear(8, 1))
        self.average = copy.deepcopy(self.model)
        trained = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(trained, lr=0.01)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.optimizer, 0.95)
        self.state = {
            "model": self.model,
            "average": self.average,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
        }

    def loss(self, number: int) -> torch.Tensor:
        x = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        return (self.model(x) - x.sum(1, keepdim=True).sin()).square().mean()

    def update(self, healer: Any, number: int) -> None:
        loss = self.loss(number)
        healer.observe(loss)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def finish_step(self) -> None:
        """What follows the step of the optimizer in the body of the loop."""
        self.scheduler.step()
        with torch.no_grad():
            for mean, p in zip(self.average.parameters(), self.model.parameters(), strict=True):
                mean.lerp_(p, 0.1)

    def weights(self) -> list[Any]:
        parts = [*self.model.parameters(), *self.average.parameters()]
        return [part.detach().numpy().copy() for part in parts]


def by_load_state_dict(run: Training) -> None:
    run.model.load_state_dict(run.average.state_dict())


def by_data_copy(run: Training) -> None:
    """As EMA classes do; torch's version of the parameter stays the same."""
    for p, mean in zip(run.model.parameters(), run.average.parameters(), strict=True):
        p.data.copy_(mean.data)


def by_new_storage(run: Training) -> None:
    for p, mean in zip(run.model.parameters(), run.average.parameters(), strict=True):
        p.data = mean.data.clone()


def by_assignment(run: Training) -> None:
    """The model gets other parameters; the optimizer keeps its own."""
    run.model.load_state_dict(run.average.state_dict(), assign=True)


def by_half(run: Training) -> None:
    run.model.half()


def by_merging(run: Training) -> None:
    run.model[0].merge()  # type: ignore[operator]


SWAPS = [by_load_state_dict, by_data_copy, by_new_storage, by_assignment, by_half, by_merging]


def train(
    run: Training,
    store: Path,
    *,
    after_epoch: Callable[[Healer], object] = lambda healer: None,
    at_8: Callable[[Healer], object] = lambda healer: None,
    at_start_of_9: Callable[[Healer], object] = lambda healer: None,
    finish: Callable[[Training], object] = lambda run: None,
) -> Training:
    """Two epochs of 7 steps; each function is called at one place."""
    with Healer(with_answers(), state=run.state, store=store, checkpoints=EVERY_5) as healer:
        for epoch in healer.epochs(2):
            for number in healer.batches(range(7), epoch=epoch):
                if healer.step == 9:
                    at_start_of_9(healer)
                run.update(healer, number)
                run.finish_step()
                finish(run)
                if healer.step == 8:
                    at_8(healer)
            if epoch == 0:
                after_epoch(healer)
    return run


def undisturbed(folder: Path) -> list[Any]:
    return train(Training(), folder / "undisturbed").weights()


def fail(*_: Any) -> None:
    raise OSError("metric server gone")


def ends_in_evaluation(run: Training, store: Path, swap: Callable[[Training], None], place: str):
    """The run ends at a place while `swap` has replaced the weights. Returns the reason's line."""

    def evaluate(healer: Healer) -> None:
        swap(run)
        fail()

    with pytest.raises(OSError, match="metric"):
        train(run, store, **{place: evaluate})  # type: ignore[arg-type]
    new_process()
    (line,) = [e["problem"] for e in events(store, "problem") if "no checkpoint" in e["problem"]]
    return line


@pytest.mark.parametrize(
    ("swap", "place"),
    [
        *((swap, "after_epoch") for swap in SWAPS),
        pytest.param(by_data_copy, "at_8", marks=pytest.mark.slow),
        (by_half, "at_8"),
        pytest.param(by_data_copy, "at_start_of_9", marks=pytest.mark.slow),
        (by_merging, "at_start_of_9"),
    ],
)
def test_an_exception_in_an_evaluation_saves_no_replaced_weights(swap, place, tmp_path):
    store = tmp_path / "store"
    line = ends_in_evaluation(Training(), store, swap, place)
    assert "model." in line
    assert "it resumes from the checkpoint of step 5" in line
    assert same(train(Training(), store).weights(), undisturbed(tmp_path))


@pytest.mark.parametrize("swap", [by_load_state_dict, by_data_copy])
def test_a_signal_in_an_evaluation_saves_no_replaced_weights(swap, tmp_path):
    run = Training()
    store = tmp_path / "store"

    def evaluate(healer: Healer) -> None:
        backup = copy.deepcopy(run.model.state_dict())
        swap(run)
        os.kill(os.getpid(), signal.SIGTERM)
        for number in healer.batches(range(3)):
            run.loss(number)
        run.model.load_state_dict(backup)

    with pytest.raises(Terminated):
        train(run, store, after_epoch=evaluate)
    new_process()
    assert events(store, "save")[-1]["step"] == 5
    assert any("no checkpoint" in each["problem"] for each in events(store, "problem"))

    def evaluates(healer: Healer) -> None:
        for number in healer.batches(range(3)):
            again.loss(number)

    again = Training()
    train(again, store, after_epoch=evaluates)
    assert same(again.weights(), undisturbed(tmp_path))


def test_an_exit_in_an_evaluation_saves_no_replaced_weights(tmp_path):
    run = Training()
    store = tmp_path / "store"

    def evaluate(healer: Healer) -> None:
        by_data_copy(run)
        sys.exit("the metric is too low")

    with pytest.raises(SystemExit):
        train(run, store, after_epoch=evaluate)
    assert events(store, "save")[-1]["step"] == 5


def swapped_in_and_back(run: Training) -> None:
    """An evaluation of the average: every parameter is written, and has its old bits again."""
    backup = copy.deepcopy(run.model.state_dict())
    by_data_copy(run)
    by_load_state_dict(run)
    run.model.load_state_dict(backup)


def clamped(run: Training) -> None:
    for p in run.optimizer.param_groups[0]["params"]:
        p.data.clamp_(-0.05, 0.05)


def masked(run: Training) -> None:
    with torch.no_grad():
        run.model[2].weight.mul_(run.model[2].weight.abs() > 0.1)  # type: ignore[operator]


def reset_and_announced(healer: Healer, run: Training) -> None:
    nn.init.zeros_(run.model[2].weight)  # type: ignore[arg-type]
    healer.expect_change()
    fail()


@pytest.mark.parametrize(
    ("finish", "place"),
    [
        (clamped, "after_epoch"),
        (clamped, "at_start_of_9"),
        (masked, "at_start_of_9"),
        (swapped_in_and_back, "after_epoch"),
    ],
)
def test_what_a_program_does_after_each_step_belongs_to_the_step(finish, place, tmp_path):
    run = Training()
    store = tmp_path / "store"
    with suppress(OSError):
        train(run, store, finish=finish, **{place: fail})
    new_process()
    step = {"after_epoch": 7, "at_start_of_9": 9}[place]
    assert (events(store, "save")[-1]["step"], events(store, "save")[-1]["why"]) == (
        step,
        "emergency",
    )
    whole = train(Training(), tmp_path / "undisturbed", finish=finish)
    assert same(train(Training(), store, finish=finish).weights(), whole.weights())


def test_an_exception_right_after_the_step_is_saved(tmp_path):
    with suppress(OSError):
        train(Training(), tmp_path, at_8=fail)
    assert events(tmp_path, "save")[-1]["step"] == 8


def test_an_announced_change_is_saved(tmp_path):
    run = Training()
    with suppress(OSError):
        train(run, tmp_path, after_epoch=lambda healer: reset_and_announced(healer, run))
    assert events(tmp_path, "save")[-1]["step"] == 7
    again = Training()
    with suppress(OSError):
        train(again, tmp_path, after_epoch=fail)
    assert not again.model[2].weight.any()  # type: ignore[union-attr]


def test_the_programs_own_save_and_the_end_save_what_is_there(tmp_path):
    run = Training()
    train(
        run,
        tmp_path,
        after_epoch=lambda healer: (by_merging(run), healer.save()),
        at_8=lambda healer: None,
    )
    assert [each["step"] for each in events(tmp_path, "save")] == [0, 5, 7, 10, 14]
    assert not events(tmp_path, "problem")


def test_parameters_that_are_made_anew_are_followed(tmp_path):
    """A layer that the program replaces: its optimizer trains the new parameters from now on."""
    run = Training()

    def grow(healer: Healer) -> None:
        for p in run.model[2].parameters():
            del run.optimizer.state[p]
        layer = run.model[2] = nn.Linear(8, 1)
        run.optimizer.param_groups[0]["params"][-2:] = [*layer.parameters()]

    with suppress(OSError):
        train(run, tmp_path, after_epoch=grow, at_start_of_9=fail)
    assert events(tmp_path, "save")[-1]["step"] == 9
