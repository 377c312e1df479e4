"""What a comparison evaluates: the `loss_fn` with its random numbers, and the trained weights."""

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

from healcore import Healer
from healcore.torch.driver.driver import TorchDriver
from tests.open_run import run_of
from tests.torch.driver.compared_run import CHANGE, ComparedRun


@pytest.mark.parametrize("gives_loss", [False, True], ids=["observe", "loss"])
def test_both_sides_draw_the_same_numbers(tmp_path, gives_loss):
    """A training loss had other draws than a comparison has, so it is evaluated again."""
    run = ComparedRun()
    drawn: list[tuple[float, ...]] = []

    def loss_fn(number: int) -> Tensor:
        draws = float(torch.rand(())), float(np.random.rand()), random.random()  # noqa: NPY002
        if not torch.is_grad_enabled() and number:  # the Healer tries the first batch alone
            drawn.append((number, *draws))
        return run.loss(number) * (0.5 + sum(draws) / 3)

    healer = run.train(tmp_path, loss_fn=loss_fn, gives_loss=gives_loss, steps=310)
    assert healer.rollbacks == 0
    assert len(drawn) >= 6
    # A comparison evaluates one or three batches with one side, then the same with the other side.
    assert all(number % 2 == 0 for number in Counter(drawn).values())


def test_an_average_stays_current_while_earlier_weights_are_evaluated():
    model = nn.Linear(2, 1)
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "average": average, "optimizer": optimizer})
    weights = driver.copy_weights()
    assert weights.keys() == {id(p) for p in model.parameters()}
    with torch.no_grad():
        for p in (*model.parameters(), *average.parameters()):
            p.fill_(3.0)

    def both_biases(batch: Any) -> Tensor:
        return (model.bias + 100 * average.bias).sum()

    (loss,) = driver.losses_of(both_biases, [None], weights)
    assert loss == pytest.approx(weights[id(model.bias)].item() + 300.0)
    assert model.bias.item() == average.bias.item() == 3.0


class Normalized(nn.Module):
    """A net with batch normalization, its average, and what the program sets."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.average = copy.deepcopy(self.net[0]).requires_grad_(False)
        prune.random_unstructured(self.net[0], "weight", 0.5)
        self.register_buffer("temperature", torch.ones(()))
        self.register_buffer("queue", torch.ones(5, 2))


def driven(model: nn.Module) -> TorchDriver:
    trained = [p for p in model.parameters() if p.requires_grad]
    return TorchDriver({"model": model, "optimizer": torch.optim.SGD(trained, lr=0.1)})


def test_batch_statistics_belong_to_the_earlier_weights():
    """A layer in evaluation mode reads them: damage in them would be on both sides."""
    model: Any = Normalized()
    driver = driven(model)
    statistics = model.net[1]
    parts = [*model.net[0].parameters(), statistics.running_mean, statistics.running_var]
    weights = driver.copy_weights()
    earlier = [part.clone() for part in parts]
    with torch.no_grad():
        for part in parts:
            part.mul_(3.0).add_(1.0)
    current = [part.clone() for part in parts]

    def seen(expected: Any) -> float:
        return float(all(map(torch.equal, parts, expected)))

    assert driver.losses_of(seen, [earlier, current], weights) == [1.0, 0.0]
    assert driver.losses_of(seen, [earlier, current]) == [0.0, 1.0]
    assert seen(current)


def test_what_the_program_sets_stays_current():
    """Averages, masks, temperatures, queues; an earlier mask would bring pruned weights back."""
    model: Any = Normalized()
    driver = driven(model)
    weights = driver.copy_weights()
    with torch.no_grad():
        for tensor in (model.temperature, model.queue, model.net[0].weight_mask):
            tensor.zero_()
        for p in (*model.average.parameters(), model.net[0].weight_orig):
            p.zero_()

    def seen(batch: Any) -> float:
        assert model.net[0].weight_orig.abs().sum() > 0, "the earlier weights"
        kept = (model.temperature, model.queue, model.net[0].weight_mask, model.average.weight)
        return float(sum(tensor.abs().sum() for tensor in kept))

    assert driver.losses_of(seen, [None], weights) == [0.0]


def test_gradients_buffers_and_attributes_are_those_of_before_an_evaluation():
    model: Any = nn.Linear(2, 1)
    model.register_buffer("count", torch.zeros(()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "optimizer": optimizer})
    model(torch.ones(2)).backward()
    optimizer.step()

    def loss_fn(batch: Tensor) -> Tensor:
        model.eval().count = model.count + 1
        loss = model(batch).sum()
        loss.backward()
        return loss

    def facts() -> list[Any]:
        return [model.training, model.count, *(p.grad for p in model.parameters())]

    before = facts()
    driver.losses_of(loss_fn, [torch.ones(2)], driver.copy_weights())
    assert all(a is b for a, b in zip(facts(), before, strict=True))
    assert model.count == 0
    assert driver.may_save(), "its backward pass is none of the loop's"


def test_a_momentum_encoder_that_the_forward_pass_updates_is_restored():
    model = nn.Linear(2, 1)
    teacher = nn.Linear(2, 1).requires_grad_(False)
    optimizer = torch.optim.SGD([*model.parameters(), *teacher.parameters()], lr=0.1)
    driver = TorchDriver({"model": model, "teacher": teacher, "optimizer": optimizer})

    def seen(batch: Tensor) -> Tensor:
        teacher.weight.data.mul_(0.9)
        teacher.bias.data = teacher.bias.data + model.bias.data
        return (teacher(batch) - model(batch)).square().sum()

    before = copy.deepcopy(teacher.state_dict())
    assert driver.losses_of(seen, [torch.ones(2)]) == driver.losses_of(seen, [torch.ones(2)])
    assert all(torch.equal(value, before[name]) for name, value in teacher.state_dict().items())


def test_weights_that_an_optimizer_copies_are_replaced_in_the_module_too():
    """The optimizer trains copies in float32, which a step writes into the module."""
    module: Any = type("M", (nn.Linear,), {"parameters": lambda m: [m.weight, m.bias]})(2, 1)
    masters = [p.detach().float() for p in module.bfloat16().parameters()]
    optimizer = torch.optim.SGD([p.requires_grad_() for p in masters], lr=0.1)
    driver = TorchDriver({"model": module, "masters": masters, "optimizer": optimizer})
    assert driver.copy_weights().keys() == {id(p) for p in (*masters, *module.parameters())}


@pytest.mark.slow
def test_an_expected_change_drops_the_copies(tmp_path):
    """Weights that are replaced on purpose are worse at first; no earlier weights are restored."""
    run = ComparedRun()

    def at(healer: Healer) -> None:
        if healer.step == CHANGE:
            healer.expect_change()
            assert not run_of(healer).witness.state.anchors
            with torch.no_grad():
                for p in run.model.parameters():
                    p.copy_(torch.randn(p.shape) / 3)

    healer: Any = run.train(tmp_path, at=at)
    assert healer.rollbacks == 0
    anchors = run_of(healer).witness.state.anchors
    assert anchors
    assert all(each.step > CHANGE for each in anchors)


def test_a_comparison_has_the_autocast_of_the_loop():
    """Some attention kernels take no float32: a loop writes `with autocast: healer.loss(batch)`."""
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    driver = TorchDriver({"model": model, "optimizer": optimizer})
    weights = driver.copy_weights()
    seen: list[Any] = []

    def loss_fn(batch: Any) -> Tensor:
        out = model(torch.ones(1, 2))
        seen.append(out.dtype)
        return out.sum()

    for enabled in (True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            driver.observe(loss_fn(None))
        driver.losses_of(loss_fn, [None], weights)
    assert seen == [torch.bfloat16] * 2 + [torch.float32] * 2
