"""A step that runs out of memory anywhere ends as if it had been done in smaller parts at once."""

from __future__ import annotations

import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from healcore.runtime.healer import Healer
from healcore.torch.driver import gradient_window
from tests.torch.bit_comparison import bits
from tests.torch.driver.out_of_memory_runs import ACCUMULATED, BATCH, STEPS, FailAt, train

HALF = BATCH // 2


@pytest.mark.parametrize(
    "every", [19, pytest.param(1, marks=pytest.mark.stress)], ids=["some", "all"]
)
def test_a_failure_at_any_operation_of_forward_and_backward(tmp_path, every):
    """Also in the second batch of an accumulation: the first one is done again with it.

    Dropout masks, batch statistics, moments, weights and the losses that the policy judges are bit
    for bit those of a run that was split from the beginning of that step.
    """
    fails_never = FailAt()
    whole = train(fails_never, tmp_path / "whole")
    assert whole.sizes == [[BATCH] * ACCUMULATED] * STEPS
    expected = [
        train(
            FailAt(), tmp_path / f"from {step}", most=lambda now, s=step: HALF if now >= s else None
        )
        for step in range(STEPS)
    ]
    steps = set()
    for number in range(1, fails_never.count + 1, every):
        found = train(FailAt(number), tmp_path / str(number))
        step = next(i for i, sizes in enumerate(found.sizes) if sizes[0] == HALF)
        steps.add(step)
        assert found.sizes == expected[step].sizes, number
        assert found.losses == expected[step].losses, number
        assert bits(found.state) == bits(expected[step].state), number
    assert steps == set(range(STEPS))


def test_a_redone_window_may_fail_again(tmp_path):
    found = train(FailAt(5, 60), tmp_path / "a")
    expected = train(FailAt(), tmp_path / "b", most=lambda step: HALF // 2)
    assert found.sizes == expected.sizes
    assert bits(found.state) == bits(expected.state)
    assert found.losses == expected.losses


def test_activations_of_the_failed_part_are_freed_before_it_is_done_again():
    """In variables of functions that have ended, and in the graph of the loop's `loss`."""
    alive: list[weakref.ref[torch.UntypedStorage]] = []
    at_begin: list[int] = []
    x, model = torch.randn(8, 64), nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        at_begin.append(sum(ref() is not None for ref in alive))
        hidden = model[1](model[0](batch))
        alive.append(weakref.ref(hidden.untyped_storage()))
        if len(at_begin) == 1:
            raise torch.OutOfMemoryError("in the forward pass")
        return model[2](hidden).square().mean()

    class FailsInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx, loss):
            return loss.clone()

        @staticmethod
        def backward(ctx, grad):
            if len(at_begin) == 2:
                raise torch.OutOfMemoryError("in the backward pass")
            return grad

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Healer(state={"model": model, "optimizer": optimizer}) as healer:
        for batch in healer.batches([x]):
            for part in healer.microbatches(batch):
                with part:
                    loss = FailsInBackward.apply(loss_fn(part.batch))
                    (loss * part.weight).backward()
            optimizer.step()
    assert at_begin[:3] == [0, 0, 0]
    assert len(at_begin) == 6, "whole, halves, four quarters"


def test_the_cache_of_the_device_is_freed_before_the_step_is_repeated(tmp_path, monkeypatch):
    calls = []
    device = SimpleNamespace(empty_cache=lambda: calls.append(1))
    fake = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda **_: None)
    monkeypatch.setattr(gradient_window.torch, "accelerator", fake)
    monkeypatch.setattr(gradient_window.torch, "get_device_module", lambda kind: device)
    train(FailAt(5), tmp_path / "run")
    assert calls == [1]
