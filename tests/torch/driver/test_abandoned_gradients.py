"""Saves of runs in which one of several optimizers no longer steps."""

import shutil

import pytest
import torch
from torch import nn

import healcore

EVERY = 10


def run(kind, folder, steps=80, interrupt=-1):
    """Trains; the first optimizer stops after step 20 unless `kind` is `accumulates`.

    Returns the steps of the checkpoints and the weights.
    """
    torch.manual_seed(0)
    data = list(torch.randn(steps, 6, 4))
    body, head = nn.Linear(4, 8), nn.Linear(8, 1)
    model, both = nn.Sequential(body, nn.Tanh(), head), [*body.parameters(), *head.parameters()]
    first = torch.optim.Adam(head.parameters(), 1e-3)
    second = torch.optim.SGD(both if kind == "two stages" else body.parameters(), 1e-2)
    state = {"model": model, "first": first, "second": second}
    checkpoints = healcore.Checkpoints(every=EVERY, keep=healcore.Keep(candidates=20))
    with healcore.Healer("default", state=state, store=folder, checkpoints=checkpoints) as healer:
        for x in healer.batches(data):
            if healer.step == interrupt:
                raise KeyboardInterrupt
            early, last_part = healer.step < 20, healer.step % 4 == 3
            if kind == "two stages":
                (first if early else second).zero_grad()
            elif kind == "frozen network":
                second.zero_grad()  # gradients of `first` remain
            loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
            healer.observe(loss)
            loss.backward()
            if kind == "accumulates":
                second.step()
                second.zero_grad()
                if last_part:
                    first.step()
                    first.zero_grad()
            else:
                (first if early else second).step()
    saved = sorted(int(each.name[5:15]) for each in folder.glob("step-*"))
    return saved, [each.detach().clone() for each in model.parameters()]


@pytest.mark.parametrize("kind", ["two stages", "frozen network"])
def test_gradients_of_an_optimizer_that_no_longer_steps_delay_no_save(kind, tmp_path):
    saved, expected = run(kind, tmp_path / "whole")
    assert saved[-5:] == [40, 50, 60, 70, 80]
    with pytest.raises(KeyboardInterrupt):
        run(kind, tmp_path / "resumed", interrupt=57)
    shutil.rmtree(max((tmp_path / "resumed").glob("step-*")))  # as after a kill
    _, weights = run(kind, tmp_path / "resumed")
    assert all(map(torch.equal, weights, expected))


def test_an_accumulation_delays_a_save_until_its_step(tmp_path):
    assert all(step % 4 == 0 for step in run("accumulates", tmp_path)[0][1:])
