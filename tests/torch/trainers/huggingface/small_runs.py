"""Small runs of a real transformers Trainer under its default arguments."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed

BATCH = 4
QUIET: dict[str, Any] = {"logging_steps": 1, "use_cpu": True, "dataloader_pin_memory": False}
QUIET |= {"log_level": "error", "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
"""Arguments of a Trainer that logs every step and writes nothing."""
SAVES: dict[str, Any] = {"save_strategy": "steps", "save_steps": 10}


class Net(nn.Module):
    """A regression that returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(torch.utils.data.Dataset):
    """Learnable rows; those of the batches in `scaled` are multiplied, by NaN or a large one."""

    def __init__(self, batches: int, scaled: Mapping[int, float] | None = None) -> None:
        draw = torch.Generator().manual_seed(3)
        self.x = torch.randn(batches * BATCH, 4, generator=draw)
        self.y = self.x.sum(-1) + 0.1 * torch.randn(batches * BATCH, generator=draw)
        for batch, factor in (scaled or {}).items():
            self.y[batch * BATCH : (batch + 1) * BATCH] *= factor

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.x[index], "labels": self.y[index]}


class InOrder(Trainer):
    """A Trainer that takes its rows in order, so that a test knows which step has which batch."""

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        rows: Any = self.train_dataset
        return torch.utils.data.SequentialSampler(rows)


class Recording(InOrder):
    """Records step and batch of each micro-batch in `seen`, and calls `asks` after it."""

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        rows: Any = getattr(self.train_dataset, "rows", self.train_dataset)
        (row,) = (rows.x[:, 0] == inputs["x"][0, 0]).nonzero()[0]
        found = (self.state.global_step, int(row) // BATCH)
        vars(self).setdefault("seen", []).append(found)
        vars(self).get("asks", bool)()
        return loss


def trainer(
    folder: Path,
    *,
    steps: int = 40,
    scaled: Mapping[int, float] | None = None,
    callbacks: Sequence[TrainerCallback] = (),
    cls: Callable[..., Trainer] = InOrder,
    **arguments: Any,
) -> Any:
    """A Trainer on `steps` batches, under HF's default arguments but for what is given."""
    set_seed(0)
    usual = {"per_device_train_batch_size": BATCH, "num_train_epochs": 1, "learning_rate": 1e-2}
    given: Any = {**usual, **QUIET, **arguments}
    return cls(
        model=Net(),
        args=TrainingArguments(output_dir=str(folder), **given),
        train_dataset=Rows(steps * given.get("gradient_accumulation_steps", 1), scaled),
        callbacks=list(callbacks),
    )


def vector(module: nn.Module) -> Tensor:
    """All parameters, as one vector."""
    return torch.cat([p.detach().reshape(-1).clone() for p in module.parameters()])


def weights(of: Any) -> Tensor:
    return vector(of.model)


def logged(of: Any, name: str) -> list[float]:
    """The values of one key of the log."""
    return [row[name] for row in of.state.log_history if name in row]


def counts(callback: Any, *names: str) -> list[float]:
    """Values of some metrics of a HealingCallback, without the prefix `heal/`."""
    metrics = callback.healing.metrics()
    return [float(metrics[f"heal/{name}"]) for name in names]


def calling(event: str, call: Callable[..., object], *, at: int | None = None) -> TrainerCallback:
    """A callback that calls `call(state, **kwargs)` at one event; with `at` only at that step."""

    def called(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if at is None or state.global_step == at:
            call(state, control=control, **kwargs)

    callback = TrainerCallback()
    setattr(callback, event, called)
    return callback


def raising(error: BaseException) -> Callable[..., object]:
    """A function that raises the error, whatever it is called with."""

    def fail(*args: object, **kwargs: object) -> None:
        raise error

    return fail


class Steps(TrainerCallback):
    """Records each optimizer step: global_step after it, epoch, and how far the weights moved."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.epochs: list[float] = []
        self.moved: list[float] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._before = vector(kwargs["model"]).double()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.steps.append(state.global_step)
        self.epochs.append(state.epoch)
        self.moved.append(float((vector(kwargs["model"]) - self._before).norm()))

    @property
    def returns(self) -> list[int]:
        """Indices of the first step after each rollback."""
        return [i for i in range(1, len(self.steps)) if self.steps[i] <= self.steps[i - 1]]
