"""`heal_trainer` where a batch does not fit into memory: it is split, or memory is saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

from healcore.torch import heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import tiny_trainers as tiny
from tests.torch.trainers.huggingface.small_runs import calling


def limit(trainer: Any, fits: Callable[[Any, int], bool]) -> list[int]:
    """The model runs out of memory unless `fits(model, rows)`; returns the rows that it saw."""
    seen: list[int] = []

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        if module.training:
            seen.append(len(kwargs["input_ids"]))
            # Within the forward pass, after micro-batches of the window that did fit.
            if len(seen) > 1 and not fits(module, seen[-1]):
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    return seen


def trainer_with_gradients(
    kind: str, accumulated: int, folder: Path, found: list[torch.Tensor]
) -> Trainer:
    """A trainer of three steps with SGD, which appends the gradient of each step."""
    arguments: dict[str, Any] = {"max_steps": 3, "optim": "sgd", "max_grad_norm": 0.0}
    arguments["gradient_accumulation_steps"] = accumulated
    # With it, the batch has to be split before the trainer finds a smaller one by itself.
    arguments["auto_find_batch_size"] = kind == "sft" and accumulated == 1
    if kind != "dpo":
        arguments["data"] = tiny.uneven(labelled=kind == "plain")
    trainer = getattr(tiny, kind)(folder, **arguments)
    if kind == "plain":  # a model without num_items_in_batch: each part has its share
        trainer.model_accepts_loss_kwargs = accumulated == 3
        # As in HF's examples, which ignore num_items_in_batch.
        trainer.compute_loss = lambda model, inputs, **_: model(**inputs)["loss"]

    def record(state: Any, *, model: Any, **_: Any) -> None:
        found.append(torch.cat([p.grad.double().reshape(-1) for p in model.parameters()]))

    trainer.add_callback(calling("on_pre_optimizer_step", record))
    return trainer


@pytest.mark.parametrize(
    ("kind", "accumulated"),
    [
        ("sft", 1),
        ("dpo", 3),
        ("plain", 3),
        pytest.param("sft", 3, marks=pytest.mark.slow),
        pytest.param("plain", 1, marks=pytest.mark.slow),
    ],
)
def test_the_gradient_is_that_of_the_full_batch(kind: str, accumulated: int, tmp_path: Path):
    """In a run whose batches are split, because only so many rows fit into memory."""
    fits = {"dpo": 4, "sft": 2, "plain": 1}[kind]
    full: list[torch.Tensor] = []
    trainer_with_gradients(kind, accumulated, tmp_path / "full", full).train()

    split: list[torch.Tensor] = []
    trainer: Any = trainer_with_gradients(kind, accumulated, tmp_path / "split", split)
    seen = limit(trainer, lambda _, rows: rows <= fits)
    own: Any = heal_trainer(trainer, store=tmp_path / "store", clip=None)
    own.train()

    # The batches were split, and the trainer knows nothing of that.
    assert max(seen[-2 * accumulated :]) <= fits, "the size is remembered"
    faults = [(event["cause"], event["answer"]) for event in events(tmp_path / "store", "fault")]
    halvings = 2 if kind == "plain" else 1
    assert faults == [(["OOM"], "shrink_microbatch")] * halvings
    assert trainer.args.per_device_train_batch_size == trainer._train_batch_size == 4
    assert trainer.args.gradient_accumulation_steps == accumulated
    assert trainer.state.global_step == 3

    for of_parts, whole in zip(split, full, strict=True):
        assert float((of_parts - whole).norm() / whole.norm()) < 1e-6


def test_gradient_checkpointing_is_the_further_step(tmp_path: Path):
    """One sample does not fit: no smaller part is left, so memory is saved another way."""
    trainer = tiny.sft(tmp_path, max_steps=3)
    model: Any = trainer.model
    on: list[bool] = []
    model.register_forward_pre_hook(lambda module, _: on.append(module.is_gradient_checkpointing))
    limit(trainer, lambda module, _: module.is_gradient_checkpointing)
    heal_trainer(trainer, store=tmp_path / "store").train()
    assert on[-1] is True
    assert not model.is_gradient_checkpointing, "as before, after the training"
    assert trainer.state.global_step == 3
