"""Which states the driver accepts, and what it installs and removes."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import ExponentialLR

from healcore.runtime.driver import Driver
from healcore.runtime.store.ranks import Alone
from healcore.torch import AttachError, SignalError, StateError, attach
from healcore.torch.driver import RngState, TorchDriver
from tests.torch.driver.small_run import CLIPS, NAN, ROLLS_BACK, Run, single_record

adam = partial(AdamW, lr=0.01)


def test_it_implements_the_protocol():
    driver: Driver = TorchDriver(Run(adam).state)
    assert driver.framework == "torch"
    assert isinstance(driver.ranks(), Alone)
    assert driver.ranks() is driver.ranks()
    assert driver.learning_rate() == 0.01


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
        ([nn.Linear(2, 2)], "list"),
        ({1: nn.Linear(2, 2)}, "names"),
        ({"model": nn.Linear(2, 2)}, "Optimizer"),
        (model_and(again=lambda o: o), "again"),
        (model_and(heal=lambda o: attach(o, ROLLS_BACK)), "attach"),
        ({"optimizer": model_and()["optimizer"]}, "parameters"),
        (model_and(model=lambda o: nn.Linear(2, 2)), "not in the state"),
        (model_and(epoch=lambda o: 3), "dictionary"),
        (model_and(order=lambda o: np.arange(3)), "ndarray"),
        (model_and(ema=lambda o: (torch.ones(2),)), "list"),
        (model_and(loader=lambda o: HalfStateful()), "load_state_dict"),
        (model_and(model=lambda o: nn.LazyLinear(2)), "lazy"),
        (model_and(ema=lambda o: nn.LazyBatchNorm1d(affine=False)), "lazy"),
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


def test_nothing_stays_on_the_first_optimizer_when_the_second_cannot_be_healed():
    state = model_and()
    state["empty"] = SGD([{"params": []}])
    with pytest.raises(AttachError, match="has no parameters"):
        TorchDriver(state, ROLLS_BACK)
    assert not state["optimizer"]._optimizer_step_pre_hooks


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


def test_close_removes_everything():
    run, twin = Run(adam), Run(adam)
    driver = TorchDriver(run.state, CLIPS)
    driver.close()
    driver.close()
    assert not run.optimizer._optimizer_step_pre_hooks
    assert not run.optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in run.model.parameters())
    for a, b in zip(run.step(0), twin.step(0), strict=True):
        assert torch.equal(a, b)
    assert driver.poll_step() is None


def test_options_reach_attach_and_the_scaler_is_found():
    scaler = torch.amp.GradScaler("cpu")
    state = model_and(scaler=lambda o: scaler)
    driver = TorchDriver(state, ROLLS_BACK, attach={"engine": "device", "compile": False})
    assert driver.healings["optimizer"].report().engine == "device"
    assert driver.healings["optimizer"].hooks.measurer.dropped.scaler is scaler
    driver.close()
    with pytest.raises(AttachError, match="engine must be"):
        TorchDriver(state, ROLLS_BACK, attach={"engine": "gpu"})


def test_losses_go_to_all_optimizers_or_to_one():
    a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    state = {"a": a, "b": b, "one": SGD(a.parameters()), "two": SGD(b.parameters())}
    driver = TorchDriver(state, ROLLS_BACK)

    def losses() -> list[float]:
        for module in (a, b):
            module(torch.ones(1)).backward()
        for name in ("one", "two"):
            state[name].step()
        handle = driver.poll_step()
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


def test_engine_states_are_loaded_completely_or_not_at_all():
    run = Run(adam)
    driver = TorchDriver(run.state, ROLLS_BACK)
    for i in range(3):
        run.step(i, NAN if i == 1 else 1.0)
    found = driver.healing()
    assert list(found) == ["optimizer"]
    for i in range(3):
        run.step(i)
    before = driver.healing()
    damaged = {**found["optimizer"], "schema": 99}
    with pytest.raises(StateError, match="schema 99"):
        driver.load_healing({"optimizer": damaged})
    with pytest.raises(StateError, match="'other'"):
        driver.load_healing({"optimizer": found["optimizer"], "other": found["optimizer"]})
    assert driver.healing() == before
    driver.load_healing({})
    assert driver.healing() == before
    driver.load_healing(found)
    assert driver.healing() == found
    run.step(4)
    assert single_record(driver).step == 4


def test_an_interrupted_step_leaves_no_cut_rate_in_a_checkpoint():
    run = Run(adam)
    driver = TorchDriver(run.state, ROLLS_BACK)
    run.step(0, NAN)

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    handle = run.optimizer.register_step_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        run.step(1)
    handle.remove()
    assert run.optimizer.param_groups[0]["lr"] == 0.005
    assert driver.items()["optimizer"].param_groups[0]["lr"] == 0.01


def test_random_generators_are_saved_and_restored():
    store = TorchDriver(Run(adam).state).store(None, ())
    state = {"rng": RngState()}
    store.save(0, state)
    first = torch.randn(3)
    state["rng"].load_state_dict(store.restore(0, state).state["rng"])
    assert torch.equal(torch.randn(3), first)
    assert RngState().state_dict()["cuda"] == [], "CUDA is not started by asking"
