"""Which states the driver accepts, and what it hands on to the optimizers."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from healcore.errors import SignalError
from healcore.torch import AttachError, attach
from healcore.torch.driver import RngState, TorchDriver
from healcore.torch.driver.driver import WITHOUT_POLL
from healcore.torch.incident_log import WITHOUT_LOSS
from tests.torch.driver.small_run import CLIPS, ROLLS_BACK, Run, single_record

adam = partial(AdamW, lr=0.01)


class HalfStateful:
    def state_dict(self) -> dict[str, Any]:
        return {}


def model_and(**more: Any) -> dict[str, Any]:
    model = nn.Linear(2, 2)
    optimizer = adam(model.parameters())
    return {"model": model, "optimizer": optimizer, **{k: f(optimizer) for k, f in more.items()}}


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (None, "NoneType"),
        ({"model": nn.Linear(2, 2)}, "Optimizer"),
        (model_and(heal=lambda o: attach(o, ROLLS_BACK)), "attach"),
        ({"optimizer": model_and()["optimizer"]}, "parameters"),
        (model_and(model=lambda o: nn.Linear(2, 2)), "not in the state"),
        (model_and(epoch=lambda o: 3), "dictionary"),
        (model_and(loader=lambda o: HalfStateful()), "load_state_dict"),
        (model_and(model=lambda o: nn.LazyLinear(2)), "lazy"),
    ],
)
def test_a_state_that_cannot_be_healed_is_rejected(state, message):
    with pytest.raises(AttachError, match=message):
        TorchDriver(state, ROLLS_BACK)


def test_a_scheduler_that_is_not_in_the_state_has_a_warning():
    state = model_and(scheduler=lambda o: ExponentialLR(o, 0.9))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TorchDriver(state, ROLLS_BACK).close()
        del state["scheduler"]
        with pytest.raises(UserWarning, match="optimizer"):
            TorchDriver(state, ROLLS_BACK)


def test_an_existing_handle_is_used_and_stays():
    state = model_and()
    heal = attach(state["optimizer"], CLIPS)
    with pytest.raises(AttachError, match="under another policy"):
        TorchDriver(state, ROLLS_BACK)
    driver = TorchDriver(state, CLIPS)
    assert driver.healings == {"optimizer": heal}
    with pytest.raises(AttachError, match="still open"):
        TorchDriver(state, CLIPS)
    driver.close()
    assert heal.attached
    TorchDriver(state, CLIPS).close()


def test_losses_go_to_all_optimizers_or_to_one():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"a": a, "b": b, "one": SGD(a.parameters()), "two": SGD(b.parameters())}
    driver = TorchDriver(state, ROLLS_BACK)

    def losses() -> list[float]:
        for module in (a, b):
            module(torch.ones(1)).backward()
        for name in ("one", "two"):
            state[name].step()
        handle = driver.steps()
        assert handle is not None
        return [record.loss for record in handle.steps()[0]]

    driver.observe(2.0)
    assert losses() == [2.0, 2.0]
    driver.observe(3.0, "one")
    driver.observe(torch.tensor(4.0), state["two"])
    assert losses() == [3.0, 4.0]
    driver.observe_eval(5.0, "two")
    with pytest.raises(AttachError, match="'three'"):
        driver.observe(1.0, "three")
    with pytest.raises(SignalError):
        driver.observe(torch.ones(2))


def test_random_generators_are_saved_and_restored():
    store = TorchDriver(Run(adam).state).store(None)
    state = {"rng": RngState()}
    store.save(0, state)
    first = torch.randn(3)
    state["rng"].load_state_dict(store.restore(0, state).state["rng"])
    assert torch.equal(torch.randn(3), first)
    assert RngState().state_dict()["cuda"] == [], "CUDA is not started by asking"


def test_a_missing_loss_has_one_warning_after_a_while():
    run = Run(adam)
    driver = TorchDriver(run.state, ROLLS_BACK)
    for i in range(60):
        run.step(i)
        single_record(driver)
        assert len(driver.warnings) == (i >= WITHOUT_LOSS - 1)
    assert "observe(loss)" in driver.warnings[0]


@pytest.mark.parametrize("polls", [True, False])
def test_steps_that_nobody_reads_have_one_line(polls: bool, caplog: pytest.LogCaptureFixture):
    run = Run(adam)
    driver = TorchDriver(run.state, ROLLS_BACK)
    for i in range(2 * WITHOUT_POLL):
        run.step(i)
        if polls and i == 0:
            driver.steps()
    said = [each.message for each in caplog.records if "healer.batches(loader)" in each.message]
    assert len(said) == (not polls)
