"""A step at a learning rate of NaN or Inf is skipped like one with a NaN gradient."""

import math

import pytest
import torch

import healcore
import healcore.torch


def optimizers(parameters):
    yield torch.optim.AdamW(parameters, 0.1)
    yield torch.optim.AdamW(parameters, 0.1, fused=True)
    yield torch.optim.SGD(parameters, 0.1, momentum=0.9, foreach=True)
    yield torch.optim.AdamW(parameters, torch.tensor(0.1), foreach=False)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("rate", [math.nan, math.inf, 1e39])
def test_the_step_is_skipped_exactly(which, rate):
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = list(optimizers([weight]))[which]
    heal = healcore.torch.attach(optimizer)
    for step in range(3):
        if step == 1:
            before = weight.detach().clone()
            group = optimizer.param_groups[0]
            usual = group["lr"]
            group["lr"] = torch.tensor(rate) if isinstance(usual, torch.Tensor) else rate
        heal.observe(1.0)
        weight.grad = torch.ones(3)
        optimizer.step()
        if step == 1:
            assert torch.equal(weight, before)
            assert optimizer.state[weight].get("step", torch.tensor(1)) == 1
            group["lr"] = usual
    assert weight.isfinite().all()
    assert not torch.equal(weight, before)


def test_a_group_without_gradients_may_have_any_rate():
    weight, unused = (torch.nn.Parameter(torch.ones(3)) for _ in range(2))
    groups = [{"params": [weight]}, {"params": [unused], "lr": math.nan}]
    optimizer = torch.optim.SGD(groups, lr=0.1)
    healcore.torch.attach(optimizer)
    weight.grad = torch.ones(3)
    optimizer.step()
    assert weight[0] < 1


def test_a_healer_completes_and_names_the_rate(tmp_path, caplog):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: math.nan if i == 5 else 1.0)
    state = {"model": model, "optimizer": optimizer, "schedule": schedule}
    with healcore.Healer(state=state, store=tmp_path) as healer:
        for _ in healer.steps(20):
            loss = model(torch.ones(4, 2)).square().mean()
            healer.observe(loss)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        assert healer.rollbacks == 0
    assert all(p.isfinite().all() for p in model.parameters())
    assert "learning rate nan; the optimizer made NaN or Inf of" in caplog.text
