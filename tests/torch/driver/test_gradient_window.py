"""A step that runs out of memory anywhere ends as if it had been done in smaller parts at once."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from healcore.torch.driver import accumulation
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


def test_the_cache_of_the_device_is_freed_before_the_step_is_repeated(tmp_path, monkeypatch):
    calls = []
    device = SimpleNamespace(empty_cache=lambda: calls.append(1))
    fake = SimpleNamespace(is_available=lambda: True, current_accelerator=lambda **_: None)
    monkeypatch.setattr(accumulation.torch, "accelerator", fake)
    monkeypatch.setattr(accumulation.torch, "get_device_module", lambda kind: device)
    train(FailAt(5), tmp_path / "run")
    assert calls == [1]
