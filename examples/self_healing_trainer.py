"""A Hugging Face Trainer that rolls back by itself: the lines that healcore adds are marked.

The learning rate warms up to a rate that is far too high. The data are well mixed, so the policy is
`pretraining`: when the loss grows from step to step, the run rolls back inside the running train()
and continues at a quarter of the rate that broke it. (`default` first compares weights, for some
twenty steps.) Without healcore the weights end as NaN. TRL's trainers (SFTTrainer, DPOTrainer,
GRPOTrainer) take the same two lines.

python examples/self_healing_trainer.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import healcore.torch  # <- healcore

STEPS = 60


def sequences() -> list[list[int]]:
    """Arithmetic sequences, which the model can learn."""
    starts = torch.randint(0, 30, (64,)).tolist()
    return [[(s + (1 + i % 3) * j) % 30 for j in range(12)] for i, s in enumerate(starts)]


def trainer(directory: str) -> Trainer:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=30,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
    )
    rows = sequences()
    arguments = TrainingArguments(
        output_dir=directory,
        max_steps=STEPS,
        per_device_train_batch_size=4,
        learning_rate=30.0,
        warmup_steps=80,
        optim="sgd",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    data = Dataset.from_dict({"input_ids": rows, "labels": rows})
    return Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=data)


def main(directory: str) -> None:
    """Train a small language model, and print how it went."""
    healed = healcore.torch.heal_trainer(
        trainer(directory), "pretraining", checkpoints=healcore.Checkpoints(every=5)
    )  # <- healcore
    healed.train()
    losses = [row["loss"] for row in healed.trainer.state.log_history if "loss" in row]
    report = healed.report()  # <- healcore
    print(f"loss {losses[-1]:.3f}, steps {report.steps}, rollbacks {report.attempts}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(sys.argv[1])
    else:
        with tempfile.TemporaryDirectory() as folder:
            main(folder)
