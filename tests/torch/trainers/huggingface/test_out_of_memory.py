"""A step that does not fit into memory is done again in parts, with the same gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset

from healcore.torch import heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling


def limit(trainer: Any, rows: int) -> list[int]:
    """The model runs out of memory for more than `rows` rows; returns what it saw."""
    seen: list[int] = []

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        count = len(kwargs["input_ids"])
        if module.training:
            seen.append(count)
            # Within the forward pass, after micro-batches of the window that did fit.
            if count > rows and len(seen) > 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    return seen


def uneven(*, labelled: bool) -> Any:
    """Rows whose parts have different numbers of tokens: by their length, or by their labels."""
    rows = tiny.rows()
    if not labelled:
        return Dataset.from_dict({"input_ids": [row[: 4 + i % 8] for i, row in enumerate(rows)]})
    labels = [[-100] * (i % 10) + row[i % 10 :] for i, row in enumerate(rows)]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


MEAN: dict[str, Any] = {"model_accepts_loss_kwargs": False}
"""Attributes of a trainer whose model takes no num_items_in_batch: each part has its share."""


@pytest.mark.parametrize(
    ("kind", "accumulated", "attributes"),
    [("sft", 1, {}), ("sft", 3, {}), ("dpo", 3, {}), ("plain", 1, MEAN)],
)
def test_the_gradient_is_that_of_the_full_batch(
    kind: str, accumulated: int, attributes: dict[str, Any], tmp_path: Path
):
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": accumulated,
        "max_steps": 3,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    if kind != "dpo":
        arguments["data"] = uneven(labelled=bool(attributes))
    fits = {"dpo": 4, "sft": 2, "plain": 1}[kind]
    gradients: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for healed, found in gradients.items():
        trainer = getattr(tiny, kind)(tmp_path / str(healed), **arguments)
        vars(trainer).update(attributes)

        def record(state: Any, *, model: Any, found: Any = found, **_: Any) -> None:
            found.append(torch.cat([p.grad.double().reshape(-1) for p in model.parameters()]))

        trainer.add_callback(calling("on_pre_optimizer_step", record))
        if not healed:
            trainer.train()
            continue
        seen = limit(trainer, fits)
        own: Any = heal_trainer(trainer, store=tmp_path / "store", clip=None)
        own.train()
        assert max(seen[-2 * accumulated :]) <= fits, "the size is remembered"
        assert own.report().counts["shrinks"] == (2 if kind == "plain" else 1)
        assert trainer.args.per_device_train_batch_size == 4
        assert trainer.args.gradient_accumulation_steps == accumulated
        assert trainer.state.global_step == 3
    for a, b in zip(gradients[True], gradients[False], strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


def test_the_batch_is_split_before_the_trainer_finds_a_smaller_one(tmp_path: Path):
    trainer = tiny.sft(tmp_path, max_steps=3, auto_find_batch_size=True)
    limit(trainer, 2)
    heal_trainer(trainer, store=tmp_path / "store").train()
    assert trainer.state.global_step == 3
    assert trainer._train_batch_size == 4
    (found,) = events(tmp_path / "store", "fault")
    assert (found["cause"], found["answer"]) == (["OOM"], "shrink_microbatch")


def test_gradient_checkpointing_is_the_further_step(tmp_path: Path):
    trainer = tiny.sft(tmp_path, max_steps=3)
    model: Any = trainer.model
    on: list[bool] = []

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        on.append(module.is_gradient_checkpointing)
        if module.training and not module.is_gradient_checkpointing:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.register_forward_pre_hook(forward, with_kwargs=True)
    heal_trainer(trainer, store=tmp_path / "store").train()
    assert on[-1] is True
    assert not model.is_gradient_checkpointing, "as before, after the training"
    assert trainer.state.global_step == 3
