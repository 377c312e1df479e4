"""The same object heals TRL's trainers."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from healcore.torch import HealingCallback
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling, logged, weights

KINDS = ["sft", "dpo", "grpo"]


def trainer(kind: str, folder: Path, *, callbacks: Any = (), **given: Any) -> Any:
    usual = {"gradient_accumulation_steps": 2, "max_steps": 16, "learning_rate": 3e-3}
    made = getattr(tiny, kind)(folder, **{**usual, **given})
    for each in callbacks:
        made.add_callback(each)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_that_is_judged_is_the_steps(tmp_path: Path, kind: str):
    """TRL's trainers scale it for the accumulation in two ways."""
    callback, judged = HealingCallback(), []

    def note(state: Any, **_: Any) -> None:
        assert callback.healing is not None
        judged.append(float(callback.healing.metrics()["heal/loss"]))

    callbacks = [callback, calling("on_step_end", note)]
    run = trainer(kind, tmp_path, callbacks=callbacks, max_steps=6)
    run.train()
    assert judged == pytest.approx(logged(run, "loss"), rel=1e-2, abs=2e-4)
    assert len(judged) == 6


@pytest.mark.parametrize("kind", ["sft", "dpo", "kto", "orpo", "cpo"])
def test_a_nan_step_is_skipped(tmp_path: Path, kind: str):
    """The output is NaN, as of a fully masked row."""
    hooks: list[Any] = []

    def poison(state: Any, *, model: Any, **_: Any) -> None:
        hook = lambda module, inputs, out: out * math.nan  # noqa: E731
        hooks.append(model.model.layers[0].register_forward_hook(hook))

    begin = calling("on_step_begin", poison, at=8)
    end = calling("on_step_end", lambda *_, **__: hooks.pop().remove(), at=9)
    run = trainer(kind, tmp_path, callbacks=[HealingCallback(), begin, end])
    run.train()
    assert weights(run).isfinite().all()
    assert logged(run, "heal/skips") == [1.0]  # a row has what has changed
    assert run.state.global_step == 16
