"""A divergence is rolled back within the running fit: weights, counters, data, and a lower rate."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

from healcore import Checkpoints, RunStopped
from healcore.policy import load
from healcore.torch import LightningHealingCallback
from tests.healer.run_options import grouped
from tests.torch.trainers.lightning.fits import Displacement, Regression, data, trainer

STEPS = 200
# Without the question whether the model is worse, which NaN batches alone do not answer with yes.
BACK = {"probation": 2, "confirm": False}
BATCHES = 8


EPOCHS = STEPS // BATCHES
every_limit = pytest.mark.parametrize(
    "limit", [{"max_epochs": EPOCHS}, {"max_steps": STEPS, "max_epochs": -1}]
)


def diverges(loader: Any = StatefulDataLoader, *callbacks: Any, **options: Any):
    """Fits with a rate that warms up to one that is far too high; what came of it."""
    torch.manual_seed(0)
    module = Regression(rate=4.0, warmup=150)
    often: Any = {"save_every": 5, "rollback": {"probation": 5}}
    callback = LightningHealingCallback("pretraining", clip=None, **grouped(often))
    running = trainer(callback, *callbacks, **options)
    running.fit(module, loader(data(BATCHES), batch_size=8, shuffle=True))
    assert callback.healer is not None
    return module, running, callback.healer


def scheduled(step: int) -> float:
    """The learning rate that the schedule has at a step."""
    return 4.0 * (0.01 + 0.99 * step / 150)


def went_back(module: Regression) -> list[tuple[Any, Any]]:
    """The batches before and after each return to an earlier step."""
    return [(a, b) for a, b in pairwise(module.seen) if b.step != a.step + 1]


@pytest.mark.parametrize("loader", [DataLoader, StatefulDataLoader])
@every_limit
def test_rolled_back_in_place(limit: dict[str, int], loader: Any):
    moves = Displacement()
    module, running, healer = diverges(loader, moves, **limit)
    assert float(module.loss(data(BATCHES).tensors)) < 0.7, "the variance of the targets is 0.5"
    (_, after), *_ = back = went_back(module)
    assert len(back) == healer.rollbacks > 0
    first = next(each for each in module.seen if each.step == after.step)
    assert (after.epoch, after.index, after.inputs) == (first.epoch, first.index, first.inputs)
    assert any(b.epoch < a.epoch for a, b in back), "also into an earlier epoch"
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
    assert moves.rates[at] < moves.rates[after.step] / 2


class Forward(DataLoader):
    """A loader that cannot be rewound."""

    def __iter__(self) -> Any:
        return super().__iter__()


@every_limit
def test_a_loader_that_cannot_be_rewound_continues_forward(limit: dict[str, int]):
    module, running, healer = diverges(Forward, **limit)
    assert healer.rollbacks > 0
    assert float(module.loss(data(BATCHES).tensors)) < 0.7
    undone = sum(a.step + 1 - b.step for a, b in went_back(module))
    positions = [(each.epoch, each.index) for each in module.seen]
    assert positions == [(i // BATCHES, i % BATCHES) for i in range(len(positions))]
    # Counted in epochs, it ends as many steps early; counted in steps, it takes more batches.
    steps = STEPS - undone if "max_steps" not in limit else STEPS
    assert (running.global_step, healer.step) == (steps, steps)


def test_trouble_in_the_last_steps_is_read_before_the_fit_ends():
    """The last step of the run is judged like the others."""
    torch.manual_seed(0)
    module = Regression()
    rules = [{"to": ["nonfinite"], "do": ["skip", "rollback"]}]
    callback = LightningHealingCallback(
        checkpoints=Checkpoints(every=2), respond=rules, rollback=BACK
    )
    running = trainer(callback, max_epochs=1)
    running.fit(module, StatefulDataLoader(data(10, bad=9), batch_size=8))
    assert callback.healer is not None
    assert callback.healer.rollbacks == 1
    assert all(each.inputs == each.inputs for each in module.seen[-3:]), "without the bad batch"
    assert module.seen[-1].index == 9, "Lightning counts it, for validation after an epoch"
    assert running.fit_loop.epoch_progress.current.completed == 1
    assert running.global_step == 9


def test_spent_budgets_end_the_run_with_a_diagnosis(tmp_path: Any):
    """NaN in every batch from some point on, and no attempt left."""
    torch.manual_seed(0)
    module = Regression()
    rows = data(60)
    rows.tensors[0][8 * 30 :] = float("nan")
    rules = [{"to": ["nonfinite"], "when": {"consecutive": 3}, "do": ["rollback", "stop"]}]
    callback = LightningHealingCallback(
        store=tmp_path, respond=rules, budget={"recoveries": 1}, rollback={"probation": 5}
    )
    running = trainer(callback, max_epochs=1)
    with pytest.raises(RunStopped) as stopped:
        running.fit(module, StatefulDataLoader(rows, batch_size=8))
    assert stopped.value.code not in (0, None)
    assert "NaN" in stopped.value.diagnosis
    assert all(p.isfinite().all() for p in module.parameters())
    assert list(tmp_path.glob("*postmortem*"))
