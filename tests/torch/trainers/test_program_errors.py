"""An error of the program under each trainer: its traceback stays whole."""

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import healcore
from healcore.torch import HealingCallback, LightningHealingCallback, heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.lightning import fits


def multiply_unequal_shapes(*_: Any, **__: Any) -> None:
    torch.mm(torch.zeros(3, 4), torch.zeros(3, 4))


def read_a_missing_row(*_: Any, **__: Any) -> None:
    torch.nn.functional.embedding(torch.tensor([9]), torch.zeros(2, 2))


Failure = Callable[..., None]


def block(store: Path, fail: Failure) -> None:
    module = fits.Regression()
    state = {"model": module, "optimizer": torch.optim.SGD(module.parameters(), 0.1)}
    with healcore.Healer(state=state, store=store) as healer:
        for _ in healer.batches([0, 1]):
            fail()


def callback(store: Path, fail: Failure) -> None:
    made = small_runs.trainer(store.parent / "out", callbacks=[HealingCallback(store=store)])
    made.model.register_forward_hook(fail)
    made.train()


def wrapped(store: Path, fail: Failure) -> None:
    made = small_runs.trainer(store.parent / "out")
    made.model.register_forward_hook(fail)
    heal_trainer(made, store=store).train()


def after_a_step(store: Path, fail: Failure) -> None:
    own = small_runs.calling("on_step_end", fail)
    made = small_runs.trainer(store.parent / "out", callbacks=[own])
    heal_trainer(made, store=store).train()


def grpo(store: Path, fail: Failure) -> None:
    made = tiny.grpo(store.parent / "out")
    made.reward_funcs[0] = fail
    heal_trainer(made, store=store).train()


def lightning(store: Path, fail: Failure) -> None:
    class Failing(fits.Regression):
        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            fail()
            return super().training_step(batch, batch_idx)

    fits.fit(LightningHealingCallback(store=store, loss_fn=None), make=Failing)


@pytest.mark.parametrize("fail", [multiply_unequal_shapes, read_a_missing_row])
@pytest.mark.parametrize("train", [block, callback, wrapped, after_a_step, grpo, lightning])
def test_the_failing_line_is_that_of_a_plain_healer(
    train: Callable[[Path, Failure], None], fail: Failure, tmp_path: Path
):
    store = tmp_path / "store"
    with pytest.raises((RuntimeError, IndexError)) as raised:
        train(store, fail)
    assert fail.__name__ in "".join(traceback.format_exception(raised.value))
    (postmortem,) = store.glob("*postmortem*")
    assert fail.__name__ in postmortem.read_text()
    (fault,) = events(store, "fault")
    assert fault["sign"] == type(raised.value).__name__
