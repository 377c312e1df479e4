"""A transformers Trainer with one object in `callbacks`: a NaN batch costs its own step."""

from __future__ import annotations

import math
import tempfile
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer, TrainingArguments, set_seed

from healcore.torch import HealingCallback


class Net(nn.Module):
    """A regression that returns its loss, as the models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        out = self.layers(x).squeeze(-1)
        return {"loss": nn.functional.mse_loss(out, labels), "logits": out}


class Rows(torch.utils.data.Dataset):
    """Sums of eight numbers; one label of the thousand is NaN."""

    def __init__(self) -> None:
        self.x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        self.y = self.x.sum(-1)
        self.y[500] = math.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"x": self.x[index], "labels": self.y[index]}


def main() -> None:
    set_seed(0)
    callback = HealingCallback("default")
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=3,
            learning_rate=1e-2,
            logging_steps=100,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            dataloader_pin_memory=False,
        )
        model = Net()
        trainer = Trainer(model=model, args=arguments, train_dataset=Rows(), callbacks=[callback])
        trainer.train()
    assert callback.healing is not None
    print(f"steps skipped: {int(callback.healing.metrics()['heal/skips'])}")
    finite = all(bool(p.isfinite().all()) for p in model.parameters())
    last = [row["loss"] for row in trainer.state.log_history if "loss" in row][-1]
    print(f"weights finite: {finite}, loss {last:.4f}")


if __name__ == "__main__":
    main()
