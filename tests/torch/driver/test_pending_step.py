"""The records of a step: the values of that step, without waiting for them."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

from healcore.core.verdict import Action, Cause
from healcore.torch.driver import TorchDriver
from tests.torch.driver.small_run import NAN, ROLLS_BACK, Run, single_record
from tests.torch.optimizer_cases import host_and_device

fused = partial(AdamW, lr=0.01, fused=True)


def driven(optimizer: Any, where: str = "host") -> tuple[Run, TorchDriver]:
    run = Run(optimizer)
    return run, TorchDriver(run.state, ROLLS_BACK, attach={"engine": where})


@host_and_device
def test_a_record_has_what_the_engine_ordered(where: str):
    run, driver = driven(fused, where)
    assert driver.steps() is None
    driver.observe(7.0)
    run.step(0)
    first = single_record(driver)
    assert driver.steps() is None
    assert (first.engine, first.step, first.loss) == ("optimizer", 1, 7.0)
    assert (first.onset, first.incident, first.incident_open) == (-1, 0, False)
    assert first.decision == (1.0, False, 1.0, Action(0), Cause(0), 0, None)
    norm = torch.nn.utils.get_total_norm(
        [p.grad for p in run.model.parameters() if p.grad is not None]
    )
    assert first.grad_norm == pytest.approx(norm.item())

    driver.observe(NAN)
    run.step(1, NAN)
    bad = single_record(driver)
    assert bad.skip is True
    assert bad.cause is Cause.NONFINITE_LOSS | Cause.NONFINITE_GRAD
    assert bad.action is Action.ROLLBACK | Action.CUT_LR
    assert (bad.lr_scale, bad.rollback_depth) == (0.5, 1)
    assert (bad.step, bad.onset, bad.incident, bad.incident_open) == (2, 1, 1, True)
    assert (bad.loss, bad.grad_norm) == (7.0, first.grad_norm)

    for i in (2, 3):
        run.step(i)
        record = single_record(driver)
    assert (record.onset, record.incident, record.incident_open) == (1, 1, False)


@host_and_device
def test_a_step_that_a_scaler_drops_was_not_judged(where: str):
    """Its record is unjudged: no step without an alarm, and not the step before."""
    run, driver = driven(fused, where)
    run.step(0, NAN)
    judged = single_record(driver)
    run.optimizer.found_inf = torch.ones(())  # type: ignore[attr-defined]
    run.step(1, NAN)
    record = single_record(driver)
    assert judged.action
    assert record.step == judged.step == 1
    assert (record.cause, record.action, record.skip) == (0, 0, False)
    assert record.lr_scale == 0.5
    assert record.incident_open
    assert record.evidence == ()


def test_two_steps_of_one_batch_have_two_records():
    a, b = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
    state = {"a": a, "b": b, "critic": SGD(a.parameters()), "actor": SGD(b.parameters())}
    driver = TorchDriver(state, ROLLS_BACK)
    for module, name, grad in ((a, "critic", NAN), (b, "actor", 1.0), (a, "critic", 1.0)):
        module.weight.grad = torch.full_like(module.weight, grad)
        state[name].step()
    handle = driver.steps()
    assert handle is not None
    records = handle.steps()[0]
    assert [(t.engine, t.step) for t in records] == [("critic", 1), ("actor", 1), ("critic", 2)]
    assert [bool(t.action & Action.ROLLBACK) for t in records] == [True, False, False]


# -- accumulation ---------------------------------------------------------------------------------


def test_gradients_left_after_a_step_are_not_an_accumulation():
    run, driver = driven(fused)
    assert driver.may_save()
    run.backward(0)
    assert not driver.may_save()
    run.optimizer.step()
    assert driver.may_save(), "cleared before the next backward, or not"
    run.optimizer.zero_grad(set_to_none=False)
    assert driver.may_save()
    run.backward(1)
    assert not driver.may_save()
    run.optimizer.zero_grad()
    assert driver.may_save(), "thrown away"
