"""TRL's trainers on a tiny Llama, with a tokenizer built in code."""

# pyright: reportPrivateImportUsage=false

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]
TEXTS = [" ".join(f"w{(start + i) % 29}" for i in range(8)) for start in range(48)]
PROMPTS = [" ".join(text.split()[:3]) for text in TEXTS]


def tokenizer() -> Any:
    """One token per word."""
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    built = Tokenizer(words)
    built.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def model(seed: int) -> Any:
    """A Llama of one layer."""
    set_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )


def trainer(kind: str, folder: Path, *, seed: int = 0, **given: Any) -> Any:
    """An SFT, DPO or GRPO trainer; `given` are callbacks and training arguments."""
    callbacks = given.pop("callbacks", [])
    arguments = {
        "output_dir": str(folder),
        "report_to": "none",
        "disable_tqdm": True,
        "log_level": "error",
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "max_steps": 16,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "learning_rate": 3e-3,
        "seed": seed,
        **given,
    }
    common = {"model": model(seed), "processing_class": tokenizer(), "callbacks": callbacks}
    if kind == "sft":
        data = Dataset.from_dict({"text": TEXTS})
        return SFTTrainer(args=SFTConfig(max_length=16, **arguments), train_dataset=data, **common)
    if kind == "dpo":
        data = Dataset.from_dict({"prompt": PROMPTS, "chosen": TEXTS, "rejected": TEXTS[::-1]})
        common["ref_model"] = model(seed)
        return DPOTrainer(args=DPOConfig(**arguments), train_dataset=data, **common)
    args = GRPOConfig(num_generations=4, max_completion_length=6, **arguments)
    return GRPOTrainer(
        args=args,
        reward_funcs=longest_word,  # pyright: ignore[reportArgumentType]
        train_dataset=Dataset.from_dict({"prompt": PROMPTS}),
        **common,
    )


def longest_word(completions: list[str], **_: Any) -> list[float]:
    """A reward that differs between completions."""
    return [float(len(set(text.split()))) for text in completions]
