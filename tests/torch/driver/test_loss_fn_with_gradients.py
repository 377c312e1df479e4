"""A `loss_fn` that differentiates: adversarial training, gradient penalties, inner loops."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from healcore import Healer
from healcore.torch.driver.driver import TorchDriver
from tests.torch.driver.compared_run import Run, left_alone

cross_entropy = nn.functional.cross_entropy
Attack = Callable[[nn.Module, Tensor, Tensor], Tensor]


def by_grad(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """One signed step away from the label, from a random start."""
    x = x + 0.01 * float(np.random.rand())  # noqa: NPY002 -- users do
    x = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(cross_entropy(model(x), y), x)
    return (x + 0.1 * slope.sign()).detach()


def by_backward(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """The same, with a backward pass that reaches the parameters too."""
    x = x.clone().requires_grad_()
    cross_entropy(model(x), y).backward()
    assert x.grad is not None
    slope = x.grad
    model.zero_grad()
    return (x + 0.1 * slope.sign()).detach()


class Attacked(Run):
    """A run whose loss is of attacked points."""

    def __init__(self, attack: Attack) -> None:
        super().__init__()
        self.attack = attack

    def loss(self, number: int) -> Tensor:
        x, y = self.batch(number)
        return cross_entropy(self.model(self.attack(self.model, x, y)), y)


@pytest.mark.parametrize("attack", [by_grad, by_backward])
def test_an_attacked_run_is_compared_and_ends_as_without(tmp_path, attack):
    ended = []
    for asks in (False, True):
        np.random.seed(0)  # noqa: NPY002
        run, folder = Attacked(attack), tmp_path / str(asks)
        healer = run.train(folder, asks=asks, steps=250)
        left_alone(folder, healer)
        ended.append(run.model.state_dict())
    comparison: Any = healer.run.recovery.dominance
    assert comparison.is_enabled
    assert comparison._prices, "weights were compared"
    plain, compared = ended
    assert all(torch.equal(plain[name], compared[name]) for name in plain)


@pytest.mark.parametrize("attack", [by_grad, by_backward])
def test_gradients_of_the_run_stay_and_no_graph_is_kept(attack):
    run = Attacked(attack)
    driver = TorchDriver({"model": run.model, "optimizer": run.optimizer})
    run.loss(0).backward()
    run.optimizer.step()
    params = [p for p in run.model.parameters() if p.grad is not None]
    gradients: Any = [p.grad for p in params]
    contents = [grad.clone() for grad in gradients]
    graphs = list[Any]()

    def loss_fn(number: int) -> Tensor:
        loss = run.loss(number)
        graphs.append(weakref.ref(loss))
        return loss

    assert driver.may_save()
    before = driver.try_loss_fn(loss_fn, 1)
    assert driver.losses_of(loss_fn, [1], driver.copy_weights()) == [before]
    assert driver.may_save(), "no gradient waits for a step"
    assert len(contents) == len(params) > 0
    for p, gradient, content in zip(params, gradients, contents, strict=True):
        assert p.grad is gradient
        assert torch.equal(gradient, content)
    gc.collect()
    assert graphs
    assert not any(graph() is not None for graph in graphs)


def test_other_functions_are_called_without_gradients():
    run, enabled = Run(), []
    driver = TorchDriver({"model": run.model, "optimizer": run.optimizer})

    def loss_fn(number: int) -> Tensor:
        enabled.append(torch.is_grad_enabled())
        if number == 1:
            raise RuntimeError("a device has failed")
        return run.loss(number)

    driver.losses_of(loss_fn, [0])
    with pytest.raises(RuntimeError, match="a device has failed"):
        driver.losses_of(loss_fn, [1])
    assert enabled == [False, False]


# -- evaluation loops -----------------------------------------------------------------------------


class Batch:
    """A batch that can be referred to weakly."""

    def __init__(self) -> None:
        self.x = torch.randn(4, 3)


def test_a_pass_without_steps_does_not_keep_its_batches():
    model = nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss_fn = lambda batch: model(batch.x).square().mean()  # noqa: E731
    state = {"model": model, "optimizer": optimizer}
    with Healer("default", state=state, loss_fn=loss_fn) as healer:
        for _ in range(2):
            for batch in healer.batches([Batch() for _ in range(3)]):
                loss = loss_fn(batch)
                healer.observe(loss)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            seen = list[Any]()
            for batch in healer.batches(Batch() for _ in range(50)):
                seen.append(weakref.ref(batch))
                assert sum(each() is not None for each in seen) <= 4
