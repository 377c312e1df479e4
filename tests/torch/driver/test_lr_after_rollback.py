"""The OPT trap: a restored optimizer or schedule overwrites the cut learning rate.

Measured where it counts: on how far the parameters move at the very next step, against a twin that
is rolled back to the same checkpoint without a cut.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW
from torch.optim import lr_scheduler as schedules

from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import (
    HOLD,
    NAN,
    ROLLS_BACK,
    Run,
    ratios,
    roll_back,
)

SCHEDULERS: dict[str, Any] = {
    "plain": None,
    "warm-up and cosine": lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 40)],
        milestones=[4],
    ),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: min(1, (step + 1) / 8)),
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=60),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.3, patience=2),
}
OPTIMIZERS: dict[str, Any] = {
    "SGD": partial(SGD, lr=0.01, momentum=0.9),
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
    "fused": partial(AdamW, lr=0.01, fused=True),
    "tensor rate": lambda params: Adam(params, lr=torch.tensor(0.01, dtype=torch.float64)),
}
SAVED, CUT = 3, 9
"""Steps taken when the checkpoint is, and until the step that is a NaN."""
SCALES = [0.5] * HOLD + [0.625, 0.75, 0.875, 1.0, 1.0]


def both(optimizer: str, scheduler: str, where: str) -> tuple[Any, ...]:
    """A run that was rolled back after a NaN, and one without a rollback."""
    runs = []
    for factor in (NAN, 1.0):
        run = Run(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
        driver = TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})
        store = driver.store(None)
        for i in range(CUT + 1):
            if i == SAVED:
                store.save(i, driver.state(), healing=driver.engines())
            run.step(i, factor if i == CUT else 1.0)
        run.step(CUT + 1)  # the host learns of it one step later
        roll_back(driver, store.restore(SAVED, driver.state()))
        runs.append((run, driver))
    return runs[0] + runs[1]


@pytest.mark.parametrize("scheduler", SCHEDULERS)
@pytest.mark.parametrize(
    ("optimizer", "where"), [(name, "host") for name in OPTIMIZERS] + [("fused", "device")]
)
def test_the_cut_applies_from_the_next_step_and_ends_on_the_schedule(optimizer, scheduler, where):
    run, driver, twin, _ = both(optimizer, scheduler, where)
    for i, scale in enumerate(SCALES, SAVED):
        for p, q in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            p.data.copy_(q.data)  # weight decay moves by where the weights are
        moved, expected = run.step(i), twin.step(i)
        found = ratios(moved, expected)
        torch.testing.assert_close(found, torch.full_like(found, scale), rtol=1e-9, atol=0)
        assert only_rate(run) == only_rate(twin), "the schedule itself is not touched"
        if scale == 1.0:
            assert all(torch.equal(a, b) for a, b in zip(moved, expected, strict=True))
    assert driver.learning_rate() == only_rate(twin)


def only_rate(run: Run) -> float:
    (group,) = run.optimizer.param_groups
    return float(group["lr"])


def test_each_optimizer_has_its_own_cut():
    """A GAN's two: only the one that met the NaN is slowed down."""
    generator, critic = nn.Linear(2, 1, bias=False), nn.Linear(3, 1, bias=False)
    optimizers = {"slow": SGD(generator.parameters(), lr=1.0), "fast": SGD(critic.parameters(), 4)}
    driver = TorchDriver({"generator": generator, "critic": critic, **optimizers}, ROLLS_BACK)
    store = driver.store(None)
    store.save(0, driver.state(), healing=driver.engines())

    def step(factor: float) -> list[float]:
        moved = []
        for module, optimizer, by in ((generator, "slow", factor), (critic, "fast", 1.0)):
            before = module.weight.detach().clone()
            module.weight.grad = torch.full_like(module.weight, by)
            optimizers[optimizer].step()
            moved.append((before - module.weight.detach()).mean().item())
        return moved

    assert step(NAN) == [0.0, pytest.approx(4.0)]
    handle = driver.steps()
    assert handle is not None
    assert [(record.engine, record.lr_scale) for record in handle.steps()[0]] == [
        ("slow", 0.5),
        ("fast", 1.0),
    ]
    roll_back(driver, store.restore(0, driver.state()))
    assert step(1.0) == [pytest.approx(0.5), pytest.approx(4.0)]
