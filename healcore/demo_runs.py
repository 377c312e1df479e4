"""The demo's scenario: the same text, weights, learning rates and faults for all runs.

A batch depends only on its index, the learning rate only on the step. The faults:

- *corrupted batches*: random bytes instead of text, as from a broken shard;
- *a wrong learning rate* in a part of the schedule: scaled for 16 workers instead of one. After
  a rollback a run repeats this part;
- *an empty batch*: all padding, so the mean loss is 0/0, and the loss and all gradients are NaN.

The model has no normalisation, with which a network this small survives almost any fault. It still
trains well (compare Fixup, arXiv:1901.09321), but diverges like large networks.
"""

from __future__ import annotations

import math
import sysconfig
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError

SYMBOLS = 256
ARMS = ("unprotected", "fixed clip", "healed")
"""No protection; gradients clipped to norm 1.0, the usual protection; a `Healer`."""
FIXED_CLIP = 1.0
SAVE_EVERY = 10
_HELD_OUT_EVERY = 10
_LARGEST = 4 * 1024 * 1024
"""Limit of the bytes to read."""
SHORTEST = 30
"""Smallest number of steps; with fewer steps the faults overlap."""


class DemoError(HealcoreError, ValueError):
    """The demo cannot run; the message says what to change."""


class Corpus(NamedTuple):
    """Text for training and evaluation, uint8 (n,) each."""

    train: np.ndarray
    held_out: np.ndarray
    """Every tenth file."""
    files: int


def load_corpus() -> Corpus:
    """Reads the modules of the standard library.

    Raises DemoError if there are too few sources, as in a stripped Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.glob("*.py"), key=lambda path: path.name)
    train, held_out, size = [], [], 0
    for index, path in enumerate(paths):
        text = path.read_bytes()
        size += len(text)
        if size > _LARGEST:
            break
        (held_out if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1 else train).append(text)
    if len(held_out) < 1 or size < 10_000:
        raise DemoError(
            f"the demo trains on the standard library's sources, and {root} holds {len(paths)} of "
            f"them with {size} bytes: use a Python that was installed with its .py files"
        )
    training, evaluation = (np.frombuffer(b"".join(texts), np.uint8) for texts in (train, held_out))
    return Corpus(training, evaluation, len(train) + len(held_out))


class Step(NamedTuple):
    """One training step."""

    step: int
    batch: int
    """Index of the batch; larger than `step` after a rollback that skipped batches."""
    loss: float
    """Loss before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""


class TokenBatch(NamedTuple):
    """The batch of one step."""

    tokens: np.ndarray
    """int32 (batch, context + 1): inputs are all but the last token, targets all but the first."""
    weights: np.ndarray
    """float32 (batch, context): weight of each target in the mean loss; 0 for padding."""


@dataclass(frozen=True)
class Scenario:
    """Data, model size, learning rates and faults of one run."""

    corpus: Corpus
    steps: int = 300
    batch: int = 16
    context: int = 64
    layers: int = 3
    width: int = 64
    heads: int = 4
    peak_rate: float = 8e-3
    """The intended learning rate, the highest with which this model trains well."""
    lr_factor: float = 16.0
    """Factor on the learning rate in `wrong_lr_steps`."""
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < SHORTEST:
            raise DemoError(
                f"steps must be at least {SHORTEST}, or the faults overlap, got {self.steps}"
            )

    # -- the faults, at fixed parts of the run --------------------------------------------------

    @cached_property
    def corrupted_batches(self) -> frozenset[int]:
        """Indices of the batches that are random bytes."""
        first, second = self._at(0.20), self._at(0.62)
        return frozenset({first, first + 1, second, second + 1})

    @cached_property
    def wrong_lr_steps(self) -> range:
        """Steps with the wrong learning rate."""
        return range(self._at(0.37), self._at(0.52))

    @cached_property
    def empty_batch(self) -> int:
        """Index of the batch that is all padding."""
        return self._at(0.80)

    def _at(self, part: float) -> int:
        return round(part * self.steps)

    # -- what a training loop needs ------------------------------------------------------------

    def learning_rate(self, step: int) -> float:
        """Warm-up, then a cosine to 2 % of the peak; scaled by `lr_factor` in `wrong_lr_steps`."""
        rate = self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))
        rate *= min(1.0, (step + 1) / 20)
        return rate * (self.lr_factor if step in self.wrong_lr_steps else 1.0)

    def training_batch(self, index: int) -> TokenBatch:
        """A batch, including its fault if it has one."""
        random = np.random.default_rng([0, index])
        tokens = self._windows(self.corpus.train, self.batch, random)
        weights = np.ones((self.batch, self.context), np.float32)
        if index in self.corrupted_batches:
            tokens = random.integers(0, SYMBOLS, tokens.shape, np.int32)
        if index == self.empty_batch:
            weights[:] = 0.0
        return TokenBatch(tokens, weights)

    def held_out_batch(self) -> TokenBatch:
        """Held-out text of 8 batches in one."""
        random = np.random.default_rng(0)
        tokens = self._windows(self.corpus.held_out, 8 * self.batch, random)
        return TokenBatch(tokens, np.ones((len(tokens), self.context), np.float32))

    def _windows(self, text: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
        starts = random.integers(0, len(text) - self.context, count)
        return text[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)

    # -- the model, as plain arrays -------------------------------------------------------------

    def initial_weights(self) -> dict[str, np.ndarray]:
        """Initial weights by name, for both frameworks; float32 (inputs, outputs)."""
        random = np.random.default_rng([0, 1 << 32])
        width = self.width
        sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
        shapes = {
            f"{name}{layer}": (width * inputs, width * outputs)
            for layer in range(self.layers)
            for name, (inputs, outputs) in sizes.items()
        }
        weights = {"embed": random.normal(size=(SYMBOLS, width)).astype(np.float32)}
        for name, shape in (shapes | {"head": (width, SYMBOLS)}).items():
            limit = shape[0] ** -0.5
            weights[name] = random.uniform(-limit, limit, shape).astype(np.float32)
        return weights

    def rotations(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of rotary position embedding (arXiv:2104.09864), (context, head / 2)."""
        half = self.width // self.heads // 2
        angles = np.arange(self.context)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
