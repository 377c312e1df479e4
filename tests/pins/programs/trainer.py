"""A Trainer of Hugging Face, healed by one call."""

import warnings
from typing import Any

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

import healcore.torch
from tests.pins.programs.interruptions import POLICY, RUN, Run, main
from tests.pins.programs.small_torch import arrays_of, damage, rows


class Net(torch.nn.Module):
    """A regression that returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Tanh(), torch.nn.Linear(8, 1)
        )

    def forward(self, number: Any, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        return {"loss": (self.layers(x) - labels).square().mean()}


class Traced(TrainerCallback):
    """Interrupts the Trainer at its steps."""

    def __init__(self, run: Run, model: Net) -> None:
        self.run, self.model = run, model

    def act(self, kind: str | None, control: Any) -> Any:
        if kind == "damage":
            damage(self.model)
        elif kind == "break":
            control.should_training_stop = True
        return control

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(self.run.interrupt("before", state.global_step), control)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        return self.act(self.run.interrupt("after", state.global_step - 1), control)


class TracedTrainer(Trainer):
    """Writes down the batch and the loss of each step."""

    run: Run

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.run.trained(self.state.global_step, inputs["number"].tolist(), loss.item())
        return loss


def train(run: Run) -> None:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    model = Net()
    data: Any = [{"number": n, "x": x, "labels": y} for n, x, y in rows(64)]
    arguments = TrainingArguments(
        str(run.folder / "trainer"),
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        seed=3,
        use_cpu=True,
        report_to="none",
        log_level="error",
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        logging_steps=10,
    )
    trainer = TracedTrainer(model, arguments, train_dataset=data, callbacks=[Traced(run, model)])
    trainer.run = run
    healed = healcore.torch.heal_trainer(trainer, POLICY, store=run.store, **RUN)
    healed.train()
    optimizer: Any = trainer.optimizer
    run.ended(trainer.state.global_step, arrays_of(model, optimizer.optimizer))


if __name__ == "__main__":
    main(train)
