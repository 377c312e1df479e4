"""The first tests to read: a bad batch, a learning rate that is too high, and a killed run."""

import signal

import pytest
import torch

from healcore import Healer
from tests import forked_programs
from tests.healer.run_directory import events
from tests.healer.training_loops import SKIPS, Faults, loop_of, rules, same, train


def test_a_nan_batch_is_skipped(tmp_path):
    """The step of batch 7 changes no weights. The next step trains again."""
    loop = loop_of("torch", Faults(always=[7]))
    weights = []  # before each step

    def before(healer: Healer, number: int) -> None:
        weights.append(loop.weights())

    train(loop, SKIPS, range(12), store=tmp_path, before=before)
    assert same(weights[7], weights[8])
    assert not same(weights[8], weights[9])
    (alarm,) = events(tmp_path, "alarm")
    assert (alarm["step"], alarm["skip"]) == (7, True)


def test_a_wrong_rate_is_rolled_back(tmp_path):
    """From step 200 on, the program sets 30 times its rate. The rollback limits the rate to 0.1."""
    weight = torch.nn.Parameter(torch.ones(8))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    data = torch.randn(300, 8, generator=torch.Generator().manual_seed(0))

    def loss_fn(batch: torch.Tensor) -> torch.Tensor:
        return (weight - 0.1 * batch).square().sum() + 1.0

    state = {"weight": weight, "optimizer": optimizer}
    with Healer("default", state=state, store=tmp_path, loss_fn=loss_fn) as healer:
        for batch in healer.batches(list(data)):
            optimizer.param_groups[0]["lr"] = 0.1 if healer.step < 200 else 3.0
            optimizer.zero_grad()
            healer.loss(batch).backward()
            optimizer.step()
    (rollback,) = events(tmp_path, "rollback")
    assert rollback["checkpoint"] <= 200 < rollback["step"]
    assert rollback["lr_limit"] == pytest.approx(0.1)
    assert weight.abs().max() < 0.2, "the mean of the data is 0"


KILLED = """
import os, signal, sys
from healcore.torch import DCPStore
from tests.healer.training_loops import at, loop_of, rules, train

store = DCPStore(sys.argv[1])

def kill(healer):
    store.wait()
    os.kill(os.getpid(), signal.SIGKILL)

train(loop_of("torch"), rules(), range(30), store=store, before=at(17, kill))
"""
"""A program that is killed before its step 17. Its newest checkpoint is of step 15."""


def test_a_killed_run_continues(tmp_path):
    """The next process ends with the weights of a run that was not killed."""
    killed = forked_programs.run("-c", KILLED, tmp_path / "store")
    assert killed.returncode == -signal.SIGKILL
    resumed = loop_of("torch")
    train(resumed, rules(), range(30), store=tmp_path / "store")
    assert resumed.faults.order == [*range(15, 30)]
    undisturbed = loop_of("torch")
    train(undisturbed, rules(), range(30))
    assert same(resumed.weights(), undisturbed.weights())
