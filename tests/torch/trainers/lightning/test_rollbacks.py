"""Rollbacks within `fit`: the loops, the data, the schedule and the callbacks go back together."""

import math
from itertools import pairwise
from typing import Any

import lightning
import pytest
from lightning.pytorch import callbacks as given
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints, RunStopped
from healcore.policy import load
from healcore.torch import LightningHealingCallback
from tests.healer.run_options import grouped
from tests.torch.trainers.lightning.fits import (
    NAN,
    Displacement,
    Regression,
    average,
    data,
    fit,
    shuffled,
    swa,
    vector,
)

STEPS, BATCHES = 200, 8


IN_EPOCHS = {"max_epochs": STEPS // BATCHES}
IN_STEPS = {"max_steps": STEPS, "max_epochs": -1}


def diverges(loader: Any, *callbacks: Any, **options: Any) -> Any:
    """Fits with a rate that warms up to one that is far too high; what came of it."""
    often: Any = {"save_every": 5, "rollback": {"probation": 5}}
    callback = LightningHealingCallback("pretraining", clip=None, **grouped(often))

    def make() -> Regression:
        return Regression(rate=4.0, warmup=150)

    def rows() -> list[Any]:
        return [shuffled(loader)]

    module, running = fit(callback, *callbacks, make=make, loaders=rows, **options)
    return module, running, callback.healer


def scheduled(step: int) -> float:
    """The learning rate that the schedule has at a step."""
    return 4.0 * (0.01 + 0.99 * step / 150)


def went_back(module: Regression) -> list[tuple[Any, Any]]:
    """The batches before and after each return to an earlier step."""
    return [(a, b) for a, b in pairwise(module.seen) if b.step != a.step + 1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("limit", "loader"),
    [(IN_EPOCHS, DataLoader), (IN_STEPS, StatefulDataLoader)],
    ids=["epochs", "steps"],
)
def test_rolled_back_in_place(limit: dict[str, int], loader: Any):
    moves = Displacement()
    module, running, healer = diverges(loader, moves, **limit)
    assert float(module.loss(data(BATCHES).tensors)) < 0.7, "the variance of the targets is 0.5"

    # Each rollback reads the batches again, also those of an earlier epoch.
    returns = went_back(module)
    assert len(returns) == healer.rollbacks > 0
    assert any(after.epoch < before.epoch for before, after in returns)
    _, after = returns[0]
    first = next(seen for seen in module.seen if seen.step == after.step)
    assert (after.epoch, after.index, after.inputs) == (first.epoch, first.index, first.inputs)

    # Lightning's counters, the schedule and the Healer agree, and the run is as long as planned:
    # counted in epochs, without the batches of the trouble; counted in steps, with others instead.
    skipped = len(healer.report().skipped_batches)
    assert skipped > 0
    steps = STEPS - skipped if "max_steps" not in limit else STEPS
    loop = running.fit_loop.epoch_loop
    schedule = running.lr_scheduler_configs[0].scheduler
    counts = (running.global_step, healer.step, schedule.last_epoch, loop._batches_that_stepped)
    assert counts == (steps,) * 4
    assert running.current_epoch == math.ceil((steps + skipped) / BATCHES)

    # The rate of the step after the rollback, from how far the parameters moved: a quarter.
    at = next(i for i, (_, each) in enumerate(pairwise(module.seen), 1) if each is after)
    share = load("pretraining").lr.factor
    assert moves.rates[at] == pytest.approx(share * scheduled(after.step), rel=1e-4)
    assert moves.rates[after.step] == pytest.approx(scheduled(after.step), rel=1e-4)


class Forward(DataLoader):
    """A loader that cannot be rewound."""

    def __iter__(self) -> Any:
        return super().__iter__()


class DamagesOnce(lightning.Callback):
    """Makes a weight NaN at one step, when the step comes for the first time."""

    def __init__(self, step: int) -> None:
        self._step = step
        self._is_done = False

    def on_train_batch_start(self, trainer: Any, module: Any, *args: Any) -> None:
        if trainer.global_step == self._step and not self._is_done:
            module.net[0].bias.data.fill_(NAN)
            self._is_done = True


def test_a_rollback_into_an_epoch_with_another_accumulation_completes():
    """The first two epochs have a step for each batch, and the third one for two batches."""
    callback: Any = LightningHealingCallback(
        checkpoints=Checkpoints(every=3),
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
        rollback={"probation": 4, "confirm": False, "skip_batches": 0},
    )
    scheduler = given.GradientAccumulationScheduler({0: 1, 2: 2})
    late = swa(swa_epoch_start=3)

    module, running = fit(DamagesOnce(17), scheduler, average(), late, callback, max_epochs=3)

    assert late.n_averaged == 1, "begun twice"
    assert running.global_step == 8 + 8 + 4, "rolled back to step 15; no batch is bad"
    assert vector(module).isfinite().all(), "with the average of the weights"


@pytest.mark.slow
@pytest.mark.parametrize("limit", [IN_EPOCHS, IN_STEPS], ids=["epochs", "steps"])
def test_a_loader_that_cannot_be_rewound_continues_forward(limit: dict[str, int]):
    module, running, healer = diverges(Forward, **limit)
    assert healer.rollbacks > 0
    assert float(module.loss(data(BATCHES).tensors)) < 0.7
    undone = sum(before.step + 1 - after.step for before, after in went_back(module))
    positions = [(seen.epoch, seen.index) for seen in module.seen]
    assert positions == [divmod(number, BATCHES) for number in range(len(positions))]
    # Counted in epochs, it ends as many steps early; counted in steps, it takes more batches.
    steps = STEPS - undone if "max_steps" not in limit else STEPS
    assert (running.global_step, healer.step) == (steps, steps)
    assert healer.report().steps_lost == STEPS - steps


def test_trouble_in_the_last_steps_is_read_before_the_fit_ends():
    """The last step of the run is judged like the others."""
    # Not asked whether the model is worse, which NaN batches alone do not answer with yes.
    callback: Any = LightningHealingCallback(
        checkpoints=Checkpoints(every=2),
        respond=[{"to": ["nonfinite"], "do": ["skip", "rollback"]}],
        rollback={"probation": 2, "confirm": False},
    )
    module, running = fit(callback, loaders=lambda: [StatefulDataLoader(data(10, bad=9), 8)])
    assert callback.healer.rollbacks == 1
    assert all(each.inputs == each.inputs for each in module.seen[-3:]), "without the bad batch"
    assert module.seen[-1].index == 9, "Lightning counts it, for validation after an epoch"
    assert running.fit_loop.epoch_progress.current.completed == 1
    assert running.global_step == 9


def test_spent_budgets_end_the_run_with_a_diagnosis(tmp_path: Any):
    """NaN in every batch from some point on, and no attempt left."""
    module = Regression()
    rows = data(60)
    rows.tensors[0][8 * 30 :] = float("nan")
    rules = [{"to": ["nonfinite"], "when": {"consecutive": 3}, "do": ["rollback", "stop"]}]
    callback = LightningHealingCallback(
        store=tmp_path, respond=rules, budget={"recoveries": 1}, rollback={"probation": 5}
    )
    with pytest.raises(RunStopped) as stopped:
        fit(callback, make=lambda: module, loaders=lambda: [StatefulDataLoader(rows, 8)])
    assert stopped.value.code not in (0, None)
    assert "NaN" in stopped.value.diagnosis
    assert all(p.isfinite().all() for p in module.parameters())
    assert list(tmp_path.glob("*postmortem*"))
