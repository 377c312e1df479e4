"""Tiny data sets, made on the spot, in the formats that the programs read."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import numpy as np


def markov_text(words: int, seed: int) -> str:
    """Text of 60 words, each drawn from a distribution that depends on the word before."""
    chances = np.random.default_rng(0).dirichlet(np.full(60, 0.05), size=60)
    random, word, found = np.random.default_rng(seed), 0, []
    for _ in range(words):
        word = random.choice(60, p=chances[word])
        found.append(f"w{word}")
    lines = (" ".join(found[i : i + 20]) for i in range(0, words, 20))
    return "\n".join(lines) + "\n"


def nanogpt(folder: Path) -> None:
    """Bytes of a text as `train.bin` and `val.bin`."""
    words(folder)
    place = folder / "data" / "tiny"
    for name, file in (("train", "train"), ("val", "valid")):
        text = (place / f"{file}.txt").read_bytes()
        np.frombuffer(text, np.uint8).astype(np.uint16).tofile(place / f"{name}.bin")
    (place / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 256}))


def sentences(folder: Path) -> None:
    """Sentences of 12 tokens, of which few are frequent, as `train.bin` and `val.bin`."""
    random, place = np.random.default_rng(0), folder / "data" / "tiny"
    place.mkdir(parents=True)
    drawn = random.integers(50_257, size=(3_000, 12), dtype=np.uint16)
    for name, count in (("train", 400_000), ("val", 20_000)):
        drawn[np.minimum(random.zipf(1.3, count), 3_000) - 1].tofile(place / f"{name}.bin")


def chargpt(folder: Path) -> None:
    """A text with the letters of chargpt's prompt."""
    (folder / "input.txt").write_text("O God, O God!\n" + markov_text(30_000, 1))


def tinystories(folder: Path) -> None:
    """Bytes of a text as two shards of llama2.c, of which the first is for validation."""
    place = folder / "data" / "tok256"
    place.mkdir(parents=True)
    for name, count, seed in (("data00", 3_000, 2), ("data01", 30_000, 1)):
        text = markov_text(count, seed).encode()
        np.frombuffer(text, np.uint8).astype(np.uint16).tofile(place / f"{name}.bin")


def words(folder: Path) -> None:
    """Three text files."""
    place = folder / "data" / "tiny"
    place.mkdir(parents=True)
    for name, count, seed in (("train", 30_000, 1), ("valid", 3_000, 2), ("test", 3_000, 3)):
        (place / f"{name}.txt").write_text(markov_text(count, seed))


def _blobs(count: int, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of one blob each, and the number of its width."""
    random = np.random.default_rng(seed)
    kinds, centres = random.integers(0, 10, count), random.uniform(0.3, 0.7, (count, 2)) * size
    y, x = np.mgrid[:size, :size]
    far = (y - centres[:, :1, None]) ** 2 + (x - centres[:, 1:, None]) ** 2
    widths = size * (0.07 + 0.02 * kinds)
    return (255 * np.exp(-far / (2 * widths[:, None, None] ** 2))).astype(np.uint8), kinds


def mnist(folder: Path) -> None:
    """Files of MNIST in torchvision's folder beside the program's."""
    place = folder.parent / "data" / "MNIST" / "raw"
    place.mkdir(parents=True, exist_ok=True)
    (folder / "results").mkdir()
    for name, count, seed in (("train", 6_400, 1), ("t10k", 640, 2)):
        for part, array in zip(
            ("images-idx3", "labels-idx1"), _blobs(count, 28, seed), strict=True
        ):
            head = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
            (place / f"{name}-{part}-ubyte").write_bytes(head + array.astype(np.uint8).tobytes())


def mnist_batches(folder: Path) -> None:
    """Batches of images and classes for Flax, as lists in NumPy's files."""
    for name, count, seed in (("train", 3_200, 1), ("test", 320, 2)):
        pictures, kinds = _blobs(count, 28, seed)
        scaled = pictures[..., None].astype(np.float32) / 255
        batches = [
            {"image": scaled[at : at + 32], "label": kinds[at : at + 32]}
            for at in range(0, count, 32)
        ]
        np.save(folder / name, np.array(batches))


def images(folder: Path) -> None:
    """Small coloured pictures."""
    from PIL import Image

    (folder / "images").mkdir()
    for number, blob in enumerate(_blobs(128, 16, 1)[0]):
        colours = np.stack([blob, blob // 2, 255 - blob], axis=-1)
        Image.fromarray(colours).save(folder / "images" / f"{number}.png")


def pictures(folder: Path) -> None:
    """Pictures as a data set `mnist` of the library datasets."""
    from datasets import Dataset, Features, Image

    (folder / "mnist").mkdir()
    for name, count, seed in (("train", 2_000, 1), ("test", 200, 2)):
        rows = Dataset.from_dict(
            {"image": list(_blobs(count, 28, seed)[0])}, Features({"image": Image()})
        )
        rows.to_parquet(folder / "mnist" / f"{name}.parquet")


def image_classes(folder: Path) -> None:
    """Pictures in one folder for each class."""
    from PIL import Image

    for name, count, seed in (("train", 800, 1), ("validation", 160, 2)):
        for number, (blob, kind) in enumerate(zip(*_blobs(count, 32, seed), strict=True)):
            place = folder / "images" / name / str(kind)
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(blob).convert("RGB").save(place / f"{number}.png")


def shards(folder: Path) -> None:
    """Pictures with their classes in four tar files of webdataset."""
    import io
    import tarfile

    from PIL import Image

    (folder / "shards").mkdir()
    pictures, kinds = _blobs(1_600, 32, 1)
    for number in range(4):
        with tarfile.open(folder / "shards" / f"{number:06}.tar", "w") as tar:
            for each in range(number * 400, number * 400 + 400):
                jpeg = io.BytesIO()
                Image.fromarray(pictures[each]).convert("RGB").save(jpeg, "jpeg")
                parts = (("jpg", jpeg.getvalue()), ("cls", str(kinds[each]).encode()))
                for kind, content in parts:
                    entry = tarfile.TarInfo(f"{each:06}.{kind}")
                    entry.size = len(content)
                    tar.addfile(entry, io.BytesIO(content))


def wikitext(folder: Path) -> None:
    """The text file of Lightning's `WikiText2`."""
    (folder / "data").mkdir()
    (folder / "data" / "wikitext-2.txt").write_text(markov_text(9_000, 1))


def _tokenizer() -> Any:
    """A tokenizer of the words of `markov_text`."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = {f"w{number}": number for number in range(60)} | {"<pad>": 60, "<eos>": 61}
    tokens = Tokenizer(models.WordLevel(names, unk_token="w0"))
    tokens.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokens, pad_token="<pad>", eos_token="<eos>")


def sentence_pairs(folder: Path) -> None:
    """A small RoBERTa model with its tokenizer, and pairs of sentences with a class each."""
    import torch
    from transformers import RobertaConfig, RobertaForSequenceClassification

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = RobertaConfig(
        vocab_size=62, num_attention_heads=2, pad_token_id=60, max_position_embeddings=128, **sizes
    )
    RobertaForSequenceClassification(config).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")
    (folder / "pairs").mkdir()
    for name, count, seed in (("train", 640, 1), ("validation", 160, 2)):
        lines = markov_text(count * 20, seed).splitlines()
        rows = ""
        for number, line in enumerate(lines):
            words = line.split()
            row = {"sentence1": " ".join(words[:10]), "sentence2": " ".join(words[10:])}
            rows += json.dumps(row | {"label": int(words[0][1:]) % 2, "idx": number}) + "\n"
        (folder / "pairs" / f"{name}.jsonl").write_text(rows)


def language_model(folder: Path) -> None:
    """A small Llama model with its tokenizer, and sentences as text and as JSON."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=62, num_attention_heads=2, num_key_value_heads=2, pad_token_id=60, **sizes
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    _tokenizer().save_pretrained(folder / "model")
    words(folder)
    (folder / "sentences").mkdir()
    for name, count, seed in (("train", 24_000, 1), ("test", 800, 2)):
        lines = markov_text(count, seed).splitlines()
        rows = "".join(json.dumps({"text": line}) + "\n" for line in lines)
        (folder / "sentences" / f"{name}.jsonl").write_text(rows)
