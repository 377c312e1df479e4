"""The numbers of parameter groups: read within the step, and held for the step alone."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import Parameter
from torch.optim import LBFGS, SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR

from healcore.core.engine import Engine
from healcore.runtime.driver import NumberRange
from healcore.torch.driver import TorchDriver
from tests.torch.bit_comparison import bits
from tests.torch.driver.small_run import NAN, ROLLS_BACK, SmallTorchRun
from tests.torch.optimizer_cases import host_and_device

HEALTHY = NumberRange(0.05, 0.05, 0.05)


def adamw(params: Any) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.05)


def driven(run: SmallTorchRun, *, where: str = "host", policy: Engine = ROLLS_BACK) -> TorchDriver:
    """A driver that reads the numbers of the run's optimizer."""
    return TorchDriver(run.state, policy, attach={"engine": where})


def values_in_step(optimizer: Optimizer, entry: str) -> list[Any]:
    """A list that gets the value of the first group's entry in each of the coming steps."""
    found: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: found.append(optimizer.param_groups[0][entry]))
    return found


def test_the_numbers_are_read_at_each_step_of_a_healer():
    run = SmallTorchRun(adamw)
    driver = TorchDriver(run.state, ROLLS_BACK)
    assert driver.numbers() == {}, "no step was taken"
    run.step(0)
    assert driver.numbers() == {
        "optimizer.betas[0]": (0.9, 0.9, 0.9),
        "optimizer.betas[1]": (0.999, 0.999, 0.999),
        "optimizer.eps": (1e-8, 1e-8, 1e-8),
        "optimizer.weight_decay": HEALTHY,
    }


def test_a_value_that_is_set_for_one_step_only_is_seen():
    run = SmallTorchRun(adamw)
    driver = driven(run)
    (group,) = run.optimizer.param_groups
    run.step(0)
    group["weight_decay"] = 100.0
    group["betas"] = (0.9, NAN)
    run.step(1)
    group["weight_decay"] = 0.05
    group["betas"] = (0.9, 0.999)
    run.step(2)
    numbers = driver.numbers()
    assert numbers["optimizer.weight_decay"] == (0.05, 100.0, 0.05)
    assert numbers["optimizer.betas[1]"] == (-math.inf, math.inf, 0.999), "NaN is in no range"
    driver.hold_numbers({})
    assert driver.numbers() == {}
    run.step(3)
    assert driver.numbers()["optimizer.weight_decay"] == HEALTHY, "the ranges begin anew"


def one_cycle(optimizer: Any) -> OneCycleLR:
    return OneCycleLR(optimizer, max_lr=0.1, total_steps=9)


def test_a_cycle_of_the_momentum_is_a_range():
    run = SmallTorchRun(adamw, one_cycle)
    driver = driven(run)
    used = values_in_step(run.optimizer, "betas")
    for i in range(8):
        run.step(i)
    first = [betas[0] for betas in used]
    seen = driver.numbers()["optimizer.betas[0]"]
    assert seen == (min(first), max(first), first[-1])
    assert seen.low < 0.86
    assert seen.high == 0.95
    assert set(driver.numbers()) == {
        *(f"optimizer.betas[{i}]" for i in (0, 1)),
        *("optimizer.eps", "optimizer.weight_decay"),
    }, "the scheduler's own entries are no numbers of the optimizer"


class DecaySchedule(LRScheduler):
    """Multiplies the weight decay by 10 after each step."""

    def get_lr(self) -> list[Any]:
        for group in self.optimizer.param_groups:
            if self.last_epoch > 0:
                group["weight_decay"] *= 10
        return [group["lr"] for group in self.optimizer.param_groups]


@host_and_device
@pytest.mark.parametrize("fused", [True, False])
def test_a_held_number_is_replaced_for_the_step_alone(where: str, fused: bool):
    run = SmallTorchRun(
        lambda p: AdamW(p, lr=0.01, weight_decay=0.05, fused=fused), lambda o: DecaySchedule(o)
    )
    driver = driven(run, where=where)
    used = values_in_step(run.optimizer, "weight_decay")
    (group,) = run.optimizer.param_groups
    driver.hold_numbers({"optimizer.weight_decay": NumberRange(0.01, 1.0, 0.05)})
    for i in range(4):
        run.step(i)
    assert used == pytest.approx([0.05, 0.5, 0.05, 0.05])
    assert group["weight_decay"] == pytest.approx(500), "the schedule reads its own value"
    seen = driver.numbers()["optimizer.weight_decay"]
    assert seen == pytest.approx((0.05, 50.0, 50.0)), "not the held value"
    driver.hold_numbers({})
    run.step(4)
    assert used[-1] == pytest.approx(500), "released"


@host_and_device
@pytest.mark.parametrize(
    ("entry", "healthy", "damaged"),
    [("weight_decay", 0.05, 100.0), ("betas", (0.9, 0.99), (0.9, 0.0)), ("eps", 1e-8, NAN)],
)
def test_a_step_with_a_held_number_moves_as_the_healthy_step(
    where: str, entry: str, healthy: Any, damaged: Any
):
    def build(params: Any) -> Optimizer:
        return AdamW(params, lr=0.01, fused=True, **{entry: healthy})

    run, twin = SmallTorchRun(build), SmallTorchRun(build)
    driver = driven(run, where=where)
    TorchDriver(twin.state, ROLLS_BACK, attach={"engine": where})
    (group,) = run.optimizer.param_groups
    for i in range(6):
        if i == 2:
            group[entry] = damaged
            driver.hold_numbers(driver.numbers())
        run.step(i)
        twin.step(i)
        assert bits(list(run.model.parameters())) == bits(list(twin.model.parameters()))
    assert group[entry] is damaged


@host_and_device
def test_reading_and_holding_change_no_bit_of_a_healthy_run(where: str):
    sgd = partial(SGD, lr=0.01, momentum=0.9, fused=True)
    runs = [SmallTorchRun(sgd, one_cycle) for _ in range(2)]
    drivers = [TorchDriver(run.state, ROLLS_BACK, attach={"engine": where}) for run in runs]
    held = {"optimizer.momentum": NumberRange(0.85, 0.95, 0.9)}
    for i in range(8):
        if i in (1, 4):
            drivers[0].hold_numbers(held)
        for run in runs:
            run.step(i, NAN if i == 5 else 1.0)
    one, other = (bits([*run.model.parameters(), run.optimizer.state_dict()]) for run in runs)
    assert one == other


def test_groups_may_be_added_at_any_time():
    run = SmallTorchRun(adamw)
    driver = driven(run)
    run.step(0)
    extra = [Parameter(torch.ones(2)), Parameter(torch.ones(3))]
    run.optimizer.add_param_group({"params": extra[:1], "weight_decay": 0.2})
    run.step(1)
    numbers = driver.numbers()
    assert numbers["optimizer.weight_decay"] == HEALTHY
    assert numbers["optimizer[1].weight_decay"] == (0.2, 0.2, 0.2)
    run.optimizer.param_groups[1]["trust"] = 3
    run.step(2)
    assert driver.numbers()["optimizer[1].trust"] == (3, 3, 3), "and entries"
    driver.hold_numbers({"optimizer[1].weight_decay": NumberRange(0.2, 0.2, 0.2)})
    used = []
    run.optimizer.register_step_pre_hook(
        lambda o, *_: used.append([group.get("weight_decay") for group in o.param_groups])
    )
    for group in run.optimizer.param_groups:
        group["weight_decay"] = 7.0
    run.step(3)
    assert used == [[7.0, 0.2]]
    run.optimizer.param_groups.pop()
    run.step(4)
    assert used[1:] == [[7.0]]


def test_the_names_tell_several_groups_and_optimizers_apart():
    params = [Parameter(torch.ones(2)) for _ in range(3)]
    one = SGD([{"params": params[:1]}, {"params": params[1:2], "momentum": 0.5}], lr=0.1)
    two = SGD(params[2:], lr=0.1, weight_decay=0.3)
    driver = TorchDriver({"net": torch.nn.ParameterList(params), "opt": one, "opt2": two})
    driver.hold_numbers({"opt2.weight_decay": NumberRange(0.0, 0.1, 0.1), "other.x": HEALTHY})
    used = values_in_step(two, "weight_decay")
    for optimizer in (one, two):
        for group in optimizer.param_groups:
            group["params"][0].grad = torch.ones(2)
        optimizer.step()
    numbers = driver.numbers()
    assert numbers["opt[1].momentum"] == (0.5, 0.5, 0.5)
    assert numbers["opt[0].momentum"] == (0, 0, 0)
    assert numbers["opt2.weight_decay"] == (0.3, 0.3, 0.3)
    assert used == [0.1]


def test_observe_mode_reads_and_never_holds():
    run = SmallTorchRun(adamw)
    policy = Engine(ROLLS_BACK.config._replace(mode="observe"))
    driver = driven(run, policy=policy)
    used = values_in_step(run.optimizer, "weight_decay")
    driver.hold_numbers({"optimizer.weight_decay": NumberRange(0.0, 0.01, 0.01)})
    run.step(0)
    assert used == [0.05]
    assert driver.numbers()["optimizer.weight_decay"] == HEALTHY


def test_a_closure_may_set_numbers_and_counts_stay_integers():
    run = SmallTorchRun(lambda p: LBFGS(p, lr=0.1, max_iter=3))
    driver = driven(run)
    used = values_in_step(run.optimizer, "max_iter")
    (group,) = run.optimizer.param_groups
    driver.hold_numbers({"optimizer.max_iter": NumberRange(3.0, 3.0, 3.0)})

    def closure() -> Any:
        group["max_iter"] = 5
        return run.evaluate(0, 1.0)

    run.optimizer.step(closure)
    assert used == [3]
    assert type(used[0]) is int
    assert group["max_iter"] == 5
    assert driver.numbers()["optimizer.max_iter"] == (5, 5, 5)


@pytest.mark.parametrize("make", [torch.tensor, lambda value: [value]], ids=["tensor", "list"])
def test_values_that_are_changed_in_place_are_read(make: Callable[[float], Any]):
    run = SmallTorchRun(adamw)
    driver = driven(run)
    (group,) = run.optimizer.param_groups
    group["own"] = own = make(0.5)
    used = values_in_step(run.optimizer, "own")
    name = "optimizer.own" if isinstance(own, torch.Tensor) else "optimizer.own[0]"
    run.step(0)
    own[0 if isinstance(own, list) else ...] = 8.0
    run.step(1)
    assert driver.numbers()[name] == (0.5, 8.0, 8.0)
    driver.hold_numbers({name: NumberRange(0.5, 0.5, 0.5)})
    run.step(2)
    assert type(used[-1]) is type(own)
    assert used[-1] == make(0.5)
    assert group["own"] is own
    assert own == make(8.0)


class CountingSGD(SGD):
    """Keeps counters in its group, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] += 1
            group["sums"][0] += 1
        return super().step(closure)


def test_counters_of_the_optimizer_are_neither_reported_nor_held():
    run = SmallTorchRun(lambda p: CountingSGD(p, lr=0.1))
    (group,) = run.optimizer.param_groups
    group["k"] = 0
    group["sums"] = [0]
    driver = driven(run)
    for i in range(3):
        run.step(i)
        assert not {"optimizer.k", "optimizer.sums[0]"} & {*driver.numbers()}
        held = NumberRange(0.0, 0.0, 0.0)
        driver.hold_numbers({"optimizer.k": held, "optimizer.sums[0]": held})
    assert (group["k"], group["sums"]) == (3, [3])


def test_a_scaled_step_uses_the_held_number():
    p = Parameter(torch.ones(2))
    optimizer = Adam([p], lr=0.1, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    state = {"net": torch.nn.ParameterList([p]), "optimizer": optimizer, "scaler": scaler}
    driver = TorchDriver(state)
    used = values_in_step(optimizer, "weight_decay")
    driver.hold_numbers({"optimizer.weight_decay": HEALTHY})
    optimizer.param_groups[0]["weight_decay"] = 100.0
    for factor in (1.0, math.inf, 1.0):
        scaler.scale((p * factor).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert used == [0.05, 0.05]
    assert optimizer.param_groups[0]["weight_decay"] == 100.0


def test_an_error_in_the_step_restores_the_program_s_value():
    run = SmallTorchRun(adamw)
    driver = driven(run)
    (group,) = run.optimizer.param_groups
    driver.hold_numbers({"optimizer.weight_decay": HEALTHY})
    group["weight_decay"] = 100.0

    def fail(*_: Any) -> None:
        raise RuntimeError("in the step")

    handle = run.optimizer.register_step_pre_hook(fail)
    with pytest.raises(RuntimeError, match="in the step"):
        run.step(0)
    handle.remove()
    assert group["weight_decay"] == 100.0
    saved = run.optimizer.state_dict()
    run.optimizer.load_state_dict(saved)  # makes new groups
    used = values_in_step(run.optimizer, "weight_decay")
    run.step(1)
    assert used == [0.05]
