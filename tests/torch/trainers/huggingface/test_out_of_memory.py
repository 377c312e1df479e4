"""A step that does not fit into memory is done again in parts, with the same gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import TrainerCallback

from healcore.runtime.loop.termination import RunStopped
from healcore.torch import heal_trainer
from tests.healer.run_directory import events
from tests.torch.trainers.huggingface import small_runs
from tests.torch.trainers.huggingface import tiny_trainers as tiny


class Gradients(TrainerCallback):
    """Records the gradient of every step."""

    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        grads = [p.grad.double().reshape(-1) for p in kwargs["model"].parameters()]
        self.seen.append(torch.cat(grads))


def out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def limit(
    trainer: Any, rows: int, *, until: int = 10**9, fail: Callable[[], object] = out_of_memory
) -> list[int]:
    """The model calls `fail` for more than `rows` rows; returns what it saw."""
    seen: list[int] = []

    def forward(module: Any, args: Any, kwargs: Any) -> None:
        count = len(kwargs["input_ids"])
        if module.training:
            seen.append(count)
            # Within the forward pass, after micro-batches of the window that did fit.
            if count > rows and len(seen) > 1 and len(seen) < until:
                fail()

    trainer.model.register_forward_pre_hook(forward, with_kwargs=True)
    return seen


def uneven() -> Any:
    """Rows of different lengths: the parts have different numbers of tokens."""
    from datasets import Dataset

    rows = [row[: 4 + i % 8] for i, row in enumerate(tiny.rows())]
    return Dataset.from_dict({"input_ids": rows})


@pytest.mark.parametrize("kind", ["sft", "dpo"])
@pytest.mark.parametrize("accumulated", [1, 3])
def test_the_gradient_is_that_of_the_full_batch(kind: str, accumulated: int, tmp_path: Path):
    arguments: dict[str, Any] = {
        "gradient_accumulation_steps": accumulated,
        "max_steps": 3,
        "optim": "sgd",
        "max_grad_norm": 0.0,
    }
    if kind == "sft":
        arguments["data"] = uneven()
    expected, found = Gradients(), Gradients()
    for callback, healed in ((expected, False), (found, True)):
        trainer = getattr(tiny, kind)(tmp_path / str(healed), **arguments)
        trainer.add_callback(callback)
        if not healed:
            trainer.train()
            continue
        per_sample = 2 if kind == "dpo" else 1
        seen = limit(trainer, 2 * per_sample)
        own: Any = heal_trainer(trainer, store=tmp_path / "store", clip=None)
        own.train()
        assert max(seen[-2 * accumulated :]) <= 2 * per_sample, "the size is remembered"
        assert own.report().counts["shrinks"] == 1
        assert trainer.args.per_device_train_batch_size == 4
        assert trainer.args.gradient_accumulation_steps == accumulated
        assert trainer.state.global_step == 3
    for a, b in zip(found.seen, expected.seen, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


def test_a_mean_loss_is_weighted_by_tokens(tmp_path: Path):
    """A model that takes no num_items_in_batch: each part has its share of the labels."""
    expected, found = Gradients(), Gradients()
    for callback, healed in ((expected, False), (found, True)):
        trainer = tiny.plain(
            tmp_path / str(healed), max_steps=3, max_grad_norm=0.0, optim="sgd", data=labelled()
        )
        trainer.model_accepts_loss_kwargs = False
        trainer.add_callback(callback)
        if healed:
            limit(trainer, 1)
            heal_trainer(trainer, store=tmp_path / "store", clip=None).train()
        else:
            trainer.train()
    for a, b in zip(found.seen, expected.seen, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-6


def labelled() -> Any:
    from datasets import Dataset

    rows = tiny.rows()
    labels = [[-100] * (i % 10) + row[i % 10 :] for i, row in enumerate(rows)]
    return Dataset.from_dict({"input_ids": rows, "labels": labels})


def test_out_of_memory_before_the_first_save(tmp_path: Path):
    """A known system crashes here; and a run without healing does."""
    trainer = tiny.sft(tmp_path, max_steps=3, save_strategy="no")
    seen = limit(trainer, 2)
    seen.append(0)  # from the very first forward pass on
    heal_trainer(trainer, store=tmp_path / "store").train()
    assert trainer.state.global_step == 3
    alone = tiny.sft(tmp_path, max_steps=3)
    limit(alone, 2)
    with pytest.raises(torch.OutOfMemoryError):
        alone.train()


@pytest.mark.parametrize(
    "fail",
    [
        lambda: torch.empty(2**58),  # the allocator of the CPU
        small_runs.raising(
            RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`")
        ),
    ],
)
def test_every_kind_of_out_of_memory_gets_the_same_answer(fail: Any, tmp_path: Path):
    trainer = tiny.sft(tmp_path, max_steps=3)
    limit(trainer, 2, fail=fail)
    heal_trainer(trainer, store=tmp_path / "store").train()
    assert trainer.state.global_step == 3
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


def test_one_sample_that_does_not_fit_stops_in_words(tmp_path: Path):
    trainer = tiny.sft(tmp_path, max_steps=3)
    limit(trainer, 0)
    healed: Any = heal_trainer(trainer, store=tmp_path / "store")
    with pytest.raises(RunStopped, match="a single sample does not fit into memory"):
        healed.train()
    report = healed.report()
    assert report.ending == "stopped"
    assert report.postmortem
    assert report.postmortem.exists()
    assert "a single sample" in report.diagnosis
