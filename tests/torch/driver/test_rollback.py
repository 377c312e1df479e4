"""The driver's part of a rollback: everything is restored, the cut of the rate stays in force."""

from functools import partial
from itertools import cycle
from typing import Any

import pytest
import torch
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop
from torch.optim import lr_scheduler as schedules

from healcore.torch.driver import TorchDriver
from healcore.torch.driver.followed_optimizer import MAX_PENDING
from tests.runtime.store.store_cases import forget
from tests.torch.bit_comparison import assert_same, snapshot
from tests.torch.driver.small_run import (
    HOLD,
    NAN,
    ROLLS_BACK,
    SmallTorchRun,
    roll_back,
    single_record,
)

MOMENTUM = partial(SGD, lr=0.01, momentum=0.9)
OPTIMIZERS: dict[str, Any] = {
    "AdamW": partial(AdamW, lr=0.01, weight_decay=0.1),
    "fused": partial(AdamW, lr=0.01, fused=True),
    "amsgrad": partial(Adam, lr=0.01, amsgrad=True),
    "tensor rate": lambda params: Adam(params, lr=torch.tensor(0.01, dtype=torch.float64)),
    "SGD": partial(SGD, lr=0.01),
    "momentum": MOMENTUM,
    "fused momentum": partial(MOMENTUM, fused=True),
    "fused nesterov": partial(MOMENTUM, nesterov=True, fused=True),
    "dampening": partial(MOMENTUM, dampening=0.5, fused=True),
    "Adagrad": partial(Adagrad, lr=0.01),
    "RMSprop": partial(RMSprop, lr=0.01, momentum=0.9, centered=True),
    "LBFGS": partial(torch.optim.LBFGS, lr=0.01),
}
SCHEDULERS: dict[str, Any] = {
    "none": None,
    "one cycle": lambda o: schedules.OneCycleLR(o, max_lr=0.1, total_steps=60),
    "warm-up and cosine": lambda o: schedules.SequentialLR(
        o,
        [schedules.LinearLR(o, 0.1, total_iters=4), schedules.CosineAnnealingLR(o, 40)],
        milestones=[4],
    ),
    "lambda": lambda o: schedules.LambdaLR(o, lambda step: min(1, (step + 1) / 8)),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.3, patience=2),
    "multi step": lambda o: schedules.MultiStepLR(o, [2, 4, 4]),
}
FUSED = [name for name in OPTIMIZERS if name.startswith(("fused", "dampening"))]
REPEATED = [
    *zip(OPTIMIZERS, cycle(SCHEDULERS), cycle(["host"]), cycle([0, 2, 2]), strict=False),
    *zip(FUSED, cycle(["multi step", "lambda"]), cycle(["device"]), cycle([0, 0, 2]), strict=False),
]


@pytest.mark.parametrize("disk", [False, True])
@pytest.mark.parametrize(("optimizer", "scheduler", "where", "saved"), REPEATED)
def test_the_same_steps_again_are_the_same_to_the_bit(
    optimizer: str, scheduler: str, where: str, saved: int, disk: bool, tmp_path: Any
):
    """Also from the snapshot before the first step, whose optimizer has no moments yet."""
    run = SmallTorchRun(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    driver = TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})
    store = driver.store(tmp_path if disk else None)
    seen = []
    for i in range(5):
        if i == saved:
            store.save(i, driver.state(), record=driver.engines())
        if i >= saved:
            seen.append(snapshot(run.optimizer))
        run.step(i)
    end = snapshot(run.optimizer)
    store.wait()
    if disk:
        forget(store)
    for _ in range(2):
        roll_back(driver, store.restore(saved, driver.state()))
        for i, before in enumerate(seen, saved):
            assert_same(snapshot(run.optimizer), before)
            run.step(i)
        assert_same(snapshot(run.optimizer), end)


def test_a_load_drops_what_is_unfinished_and_writes_into_all_other_tensors():
    """The device may not hold second moments, a CUDA graph has the gradients, SAM the groups."""
    run = SmallTorchRun(OPTIMIZERS["AdamW"])
    driver = TorchDriver(run.state, ROLLS_BACK)
    store = driver.store(None)
    run.step(0)
    store.save(1, driver.state(), record=driver.engines())

    def owned() -> list[Any]:
        """The gradients, and the tensors of the optimizer's state."""
        found: list[Any] = []
        for p, state in run.optimizer.state.items():
            found += [p.grad, *state.values()]
        return found

    before = [*owned(), *run.optimizer.param_groups]
    driver.load(store.restore(1, driver.state()).state)
    assert all(a is b for a, b in zip([*owned(), *run.optimizer.param_groups], before, strict=True))
    driver.observe(1e6)
    run.backward(0, NAN)
    driver.load(store.restore(1, driver.state()).state)
    assert all(p.grad is None for p in run.model.parameters())
    assert driver.may_save()
    driver.observe(2.0)
    run.step(0)
    assert single_record(driver).loss == 2.0
    for unread in (0, MAX_PENDING + 1):
        for i in range(unread):
            run.step(i)
        roll_back(driver, store.restore(1, driver.state()))
        run.step(0, NAN)
        record = single_record(driver)
        assert (record.step, record.taken) == (2, False), "the number of the last record, again"


def test_a_repeat_begins_without_the_gradients_of_undone_steps():
    """A program that forgets `zero_grad` adds the gradient of each step to the last gradient."""
    model = torch.nn.Linear(2, 1)
    optimizer = SGD(model.parameters(), lr=0.01)
    driver = TorchDriver({"model": model, "optimizer": optimizer}, ROLLS_BACK)
    store = driver.store(None)
    store.save(0, driver.state(), record=driver.engines())

    def gradient_without_zero_grad() -> torch.Tensor:
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        assert model.weight.grad is not None
        return model.weight.grad.clone()

    first = gradient_without_zero_grad()
    assert not torch.equal(gradient_without_zero_grad(), first)
    driver.load(store.restore(0, driver.state()).state)
    assert torch.equal(gradient_without_zero_grad(), first)


@pytest.mark.parametrize("fused", [True, False])
def test_the_scalers_state_is_restored_too(fused: bool):
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    run = SmallTorchRun(partial(AdamW, lr=0.01, fused=fused), dtype=torch.float32)
    driver = TorchDriver({**run.state, "scaler": scaler}, ROLLS_BACK)
    store = driver.store(None)
    ends = []
    for i in (0, 1, 2, 3, 1, 2, 3):
        # After two good steps the scale doubles; an overflow halves it, which is not ours to judge.
        run.optimizer.zero_grad()
        loss = torch.cat([p.flatten() for p in run.model.parameters()]).sum() * (i + 1)
        scaler.scale(loss * (NAN if i == 2 else 1.0)).backward()
        scaler.step(run.optimizer)
        scaler.update()
        assert scaler.get_scale() == (16.0 if i == 1 else 8.0)
        if i == 0:
            store.save(1, driver.state(), record=driver.engines())
        if i == 3:
            ends.append([p.detach().clone() for p in run.model.parameters()])
            roll_back(driver, store.restore(1, driver.state()))
            assert scaler.state_dict()["_growth_tracker"] == 1
    assert all(map(torch.equal, *ends))


SAVED, CUT = 3, 9
"""Steps taken when the checkpoint is, and until the step that is a NaN."""
SCALES = [0.5] * HOLD + [0.625, 0.75, 0.875, 1.0, 1.0]


def rolled_back(
    optimizer: str, scheduler: str, where: str, factor: float
) -> tuple[SmallTorchRun, Any]:
    """A run that is rolled back; it has a cut after a NaN."""
    run = SmallTorchRun(OPTIMIZERS[optimizer], SCHEDULERS[scheduler])
    driver = TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})
    store = driver.store(None)
    for i in range(CUT + 1):
        if i == SAVED:
            store.save(i, driver.state(), record=driver.engines())
        run.step(i, factor if i == CUT else 1.0)
    run.step(CUT + 1)  # the host learns of it one step later
    roll_back(driver, store.restore(SAVED, driver.state()))
    return run, driver


def only_rate(run: SmallTorchRun) -> float:
    (group,) = run.optimizer.param_groups
    return float(group["lr"])


@pytest.mark.parametrize(
    ("optimizer", "where", "scheduler"),
    [
        *(("fused", "host", name) for name in SCHEDULERS),
        *(("tensor rate", "host", name) for name in ("none", "warm-up and cosine", "one cycle")),
        *(("momentum", "host", name) for name in ("one cycle", "plateau")),
        ("AdamW", "host", "lambda"),
        ("fused", "device", "warm-up and cosine"),
    ],
)
def test_the_cut_applies_from_the_next_step_and_ends_on_the_schedule(optimizer, scheduler, where):
    """Measured on how far the parameters move, against a twin without a cut."""
    run, driver = rolled_back(optimizer, scheduler, where, NAN)
    twin, _ = rolled_back(optimizer, scheduler, where, 1.0)
    for i, scale in enumerate(SCALES, SAVED):
        for p, q in zip(run.model.parameters(), twin.model.parameters(), strict=True):
            p.data.copy_(q.data)  # weight decay moves by where the weights are
        moved, expected = (torch.cat([p.flatten() for p in each.step(i)]) for each in (run, twin))
        torch.testing.assert_close(moved, scale * expected, rtol=1e-9, atol=0)
        assert only_rate(run) == only_rate(twin), "the schedule itself is not touched"
        if scale == 1.0:
            assert torch.equal(moved, expected)
    assert [*driver.learning_rates().values()] == [only_rate(twin)]
