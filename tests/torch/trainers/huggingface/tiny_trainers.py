"""Real trainers of transformers and TRL on a tiny language model; nothing is downloaded."""

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

from tests.torch.trainers.huggingface.small_runs import QUIET

WORDS = 32
"""The size of the vocabulary; the last two are padding and the end."""


def model() -> LlamaForCausalLM:
    torch.manual_seed(1)
    sizes: Any = {"hidden_size": 16, "intermediate_size": 32, "max_position_embeddings": 64}
    twice = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes |= dict.fromkeys(twice, 2)
    tokens: Any = {"pad_token_id": WORDS - 2, "eos_token_id": WORDS - 1, "bos_token_id": WORDS - 1}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **tokens))


def tokenizer() -> transformers.PreTrainedTokenizerFast:
    words = {f"w{i}": i for i in range(WORDS - 2)} | {"<pad>": WORDS - 2, "<eos>": WORDS - 1}
    own = Tokenizer(models.WordLevel(words, unk_token="w0"))
    own.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", eos_token="<eos>"
    )


def rows(count: int = 64, length: int = 12) -> list[list[int]]:
    """Arithmetic sequences, which the model can learn."""
    draw = torch.Generator().manual_seed(0)
    starts = torch.randint(0, WORDS - 2, (count,), generator=draw).tolist()
    return [
        [(s + (1 + i % 3) * j) % (WORDS - 2) for j in range(length)] for i, s in enumerate(starts)
    ]


def uneven(*, labelled: bool) -> Any:
    """Rows whose parts have different numbers of tokens: by their length, or by their labels."""
    every = rows()
    if not labelled:
        return Dataset.from_dict({"input_ids": [row[: 4 + i % 8] for i, row in enumerate(every)]})
    labels = [[-100] * (i % 10) + row[i % 10 :] for i, row in enumerate(every)]
    return Dataset.from_dict({"input_ids": every, "labels": labels})


def arguments(folder: Path, kind: Any = TrainingArguments, **given: Any) -> Any:
    usual = {"per_device_train_batch_size": 4, "max_steps": 40, "learning_rate": 1e-2}
    return kind(str(folder), **{**usual, "seed": 3, "bf16": False, **QUIET, **given})


def plain(folder: Path, *, data: Any = None, **given: Any) -> Any:
    own = Dataset.from_dict({"input_ids": rows(), "labels": rows()}) if data is None else data
    settings = arguments(folder, **given)
    return Trainer(model=model(), args=settings, train_dataset=own, eval_dataset=own)


def summed(folder: Path, **given: Any) -> Any:
    """Divides by the items of a step in a loss function, logs and counts in each step."""

    def loss(out: Any, labels: Any, num_items_in_batch: Any) -> Any:
        if run.state.global_step:  # the dry run has a state of its own
            run.log({"rows": len(labels)})
            run.calls += 1
        logits, own = out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
        total = torch.nn.functional.cross_entropy(logits, own, reduction="sum")
        return total * (1 + 1e-4 * run.calls) / num_items_in_batch

    run = plain(folder, **given)
    run.compute_loss_func, run.calls = loss, 0
    return run


def sft(folder: Path, *, data: Any = None, **given: Any) -> Any:
    from trl import SFTConfig, SFTTrainer  # pyright: ignore[reportPrivateImportUsage]

    return SFTTrainer(
        model=model(),
        args=arguments(folder, SFTConfig, **{"gradient_checkpointing": False, **given}),
        train_dataset=Dataset.from_dict({"input_ids": rows()}) if data is None else data,
        processing_class=tokenizer(),
    )


def dpo(folder: Path, kind: str = "dpo", **given: Any) -> Any:
    """The trainer on preferences of a kind of TRL's."""
    module: Any = import_module("trl" if kind in ("dpo", "kto") else f"trl.experimental.{kind}")
    text = [[f"w{i}" for i in row] for row in rows()]
    data: dict[str, Any] = {
        "prompt": [" ".join(row[:4]) for row in text],
        "chosen": [" " + " ".join(row[4:]) for row in text],
        "rejected": [" " + " ".join(reversed(row[4:])) for row in text],
    }
    if kind == "kto":
        labels = [i % 2 == 0 for i in range(len(text))]
        data = {"prompt": data["prompt"], "completion": data["chosen"], "label": labels}
    config = getattr(module, f"{kind.upper()}Config")
    return getattr(module, f"{kind.upper()}Trainer")(
        model=model(),
        args=arguments(folder, config, **{"gradient_checkpointing": False, **given}),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer(),
        **({"ref_model": model()} if kind in ("dpo", "kto") else {}),
    )


kto, orpo, cpo = (partial(dpo, kind=kind) for kind in ("kto", "orpo", "cpo"))


def grpo(folder: Path, **given: Any) -> Any:
    from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportPrivateImportUsage]

    def reward(completions: list[str], **_: Any) -> list[float | None]:
        return [float(len(re.findall(r"w1\d", each))) for each in completions]

    text = [" ".join(f"w{i}" for i in row[:4]) for row in rows()]
    usual = {"num_generations": 4, "max_completion_length": 6, "max_steps": 10}
    return GRPOTrainer(
        model=model(),
        args=arguments(folder, GRPOConfig, **{**usual, "gradient_checkpointing": False, **given}),
        train_dataset=Dataset.from_dict({"prompt": text}),
        processing_class=tokenizer(),
        reward_funcs=reward,
    )
