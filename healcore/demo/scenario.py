"""What happens to the run: the same text, weights, learning rates and faults for everybody.

A batch depends on the seed and its index alone, the learning rate on the step: never on the
framework or on what healing did. Each fault is one that training runs have:

- *corrupted batches*: random bytes instead of text, as from a broken shard;
- *a wrong learning rate*: scaled for 16 workers where there is one, in a part of the schedule. A
  run that goes back comes to that part once more;
- *an empty batch*: every position is padding, so that the mean over what counts is 0/0. The loss
  and all gradients are NaN, and nobody wrote NaN anywhere.

Normalisation lets a network this small survive nearly anything; large ones are not so lucky. So
this one has none at all (it trains well without, compare Fixup, arXiv:1901.09321), and breaks as
large ones do: activations, loss and gradients run away, and the right learning rate, when it comes
back, comes too late.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from healcore.core.errors import HealcoreError
from healcore.demo.corpus import SYMBOLS, Corpus

SHORTEST = 30
"""Steps below which the faults run into one another."""


class ScenarioError(HealcoreError, ValueError):
    """A run that cannot be: the message says what was received and what to pass."""


class Batch(NamedTuple):
    """What one step learns from."""

    tokens: np.ndarray
    """int32 (batch, context + 1): inputs are all but the last, targets all but the first."""
    weights: np.ndarray
    """float32 (batch, context): what each target counts in the mean loss; 0 is padding."""


@dataclass(frozen=True)
class Scenario:
    """One run's data, model size, learning rates and faults."""

    corpus: Corpus
    seed: int = 0
    steps: int = 300
    batch: int = 16
    context: int = 64
    layers: int = 3
    width: int = 64
    heads: int = 4
    peak_rate: float = 8e-3
    """The learning rate that was meant: the highest at which this model trains well."""
    mistake: float = 16.0
    """What the learning rate is multiplied by, by mistake."""
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        if self.steps < SHORTEST:
            raise ScenarioError(
                f"steps must be at least {SHORTEST}, for the faults to stay apart, got {self.steps}"
            )
        if self.width % (2 * self.heads):
            raise ScenarioError(
                f"width must be a multiple of twice the heads ({2 * self.heads}), got {self.width}"
            )

    # -- the faults, at fixed parts of the run --------------------------------------------------

    @cached_property
    def corrupted(self) -> frozenset[int]:
        """Indices of the batches that are random bytes."""
        first, second = self._at(0.20), self._at(0.62)
        return frozenset({first, first + 1, second, second + 1})

    @cached_property
    def mistaken(self) -> range:
        """Steps with the wrong learning rate."""
        return range(self._at(0.37), self._at(0.52))

    @cached_property
    def empty(self) -> int:
        """Index of the batch that is all padding."""
        return self._at(0.80)

    def _at(self, part: float) -> int:
        return round(part * self.steps)

    # -- what a training loop asks for ----------------------------------------------------------

    def learning_rate(self, step: int) -> float:
        """Warm-up, then a cosine down to 2 % of the peak; `mistake` times that while it lasts."""
        rate = self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))
        rate *= min(1.0, (step + 1) / 20)
        return rate * (self.mistake if step in self.mistaken else 1.0)

    def training_batch(self, index: int) -> Batch:
        """A batch, with its fault if it has one."""
        random = np.random.default_rng([self.seed, index])
        tokens = self._windows(self.corpus.train, self.batch, random)
        weights = np.ones((self.batch, self.context), np.float32)
        if index in self.corrupted:
            tokens = random.integers(0, SYMBOLS, tokens.shape, np.int32)
        if index == self.empty:
            weights[:] = 0.0
        return Batch(tokens, weights)

    def held_out_batch(self) -> Batch:
        """8 batches' worth of text that nobody trains on; the same for every seed."""
        random = np.random.default_rng(0)
        tokens = self._windows(self.corpus.held_out, 8 * self.batch, random)
        return Batch(tokens, np.ones((len(tokens), self.context), np.float32))

    def _windows(self, text: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
        starts = random.integers(0, len(text) - self.context, count)
        return text[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)

    # -- the model, as plain arrays -------------------------------------------------------------

    def initial_weights(self) -> Weights:
        """Both frameworks begin with these very numbers, float32."""
        random = np.random.default_rng([self.seed, 1 << 32])
        width = self.width

        def matrix(rows: int, columns: int) -> np.ndarray:
            limit = rows**-0.5
            return random.uniform(-limit, limit, (rows, columns)).astype(np.float32)

        return Weights(
            embed=random.normal(size=(SYMBOLS, width)).astype(np.float32),
            blocks=tuple(
                BlockWeights(
                    qkv=matrix(width, 3 * width),
                    out=matrix(width, width),
                    up=matrix(width, 4 * width),
                    down=matrix(4 * width, width),
                )
                for _ in range(self.layers)
            ),
            head=matrix(width, SYMBOLS),
        )

    def rotations(self) -> tuple[np.ndarray, np.ndarray]:
        """Cosine and sine of rotary position embedding (arXiv:2104.09864), (context, head / 2)."""
        half = self.width // self.heads // 2
        angles = np.arange(self.context)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


class BlockWeights(NamedTuple):
    """One block's matrices, (inputs, outputs)."""

    qkv: np.ndarray
    out: np.ndarray
    up: np.ndarray
    down: np.ndarray


class Weights(NamedTuple):
    """The whole model."""

    embed: np.ndarray
    """(256, width)."""
    blocks: tuple[BlockWeights, ...]
    head: np.ndarray
    """(width, 256)."""
