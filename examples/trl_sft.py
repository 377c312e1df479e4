"""TRL's SFTTrainer with one object in `callbacks`; any other of its trainers takes it too."""

from __future__ import annotations

import tempfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl.trainer.sft_config import SFTConfig
from trl.trainer.sft_trainer import SFTTrainer

from healcore.torch import HealingCallback

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(29))]


def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word: nothing is downloaded."""
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    built = Tokenizer(words)
    setattr(built, "pre_tokenizer", pre_tokenizers.Whitespace())  # noqa: B010
    return PreTrainedTokenizerFast(
        tokenizer_object=built, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )


def main() -> None:
    set_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=64,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    texts = [" ".join(f"w{(start + i) % 29}" for i in range(12)) for start in range(256)]
    callback = HealingCallback("default")
    with tempfile.TemporaryDirectory() as folder:
        arguments = SFTConfig(
            output_dir=folder,
            max_length=32,
            max_steps=60,
            learning_rate=1e-2,
            logging_steps=20,
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
            bf16=False,
        )
        trainer = SFTTrainer(
            model=model,
            args=arguments,
            train_dataset=Dataset.from_dict({"text": texts}),
            processing_class=tokenizer(),
            callbacks=[callback],
        )
        trainer.train()
    assert callback.healing is not None
    print(f"steps skipped: {int(callback.healing.metrics()['heal/skips'])}")
    losses = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}")


if __name__ == "__main__":
    main()
