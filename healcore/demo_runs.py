"""The demo's training: the same text, model, learning rates and faults for all runs.

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
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from healcore import Checkpoints, Healer, Logging, RunStopped  # <- healcore
from healcore.core.errors import HealcoreError

SYMBOLS = 256
"""Number of different bytes, which are the tokens of the model."""
ARMS = ("unprotected", "fixed clip", "healed")
"""The protections that the demo compares: none, gradients clipped to norm 1.0, and a `Healer`."""
FIXED_CLIP = 1.0
"""Norm to which the arm "fixed clip" clips."""
SAVE_EVERY = 10
"""Steps between two checkpoints of a healed run."""
_HELD_OUT_EVERY = 10
"""Each tenth file is held out."""
_MAX_CORPUS_BYTES = 4 * 1024 * 1024
"""Limit of the bytes to read."""
MIN_STEPS = 30
"""Smallest number of steps; with fewer steps the faults overlap."""


class DemoError(HealcoreError, ValueError):
    """The demo cannot run; the message says what to change.

    For example, the number of steps is too small for its faults, or Python was installed without
    the sources that the demo trains on.
    """


class Corpus(NamedTuple):
    """Text for training and evaluation, uint8 (n,) each: one number for each byte.

    Held-out text is in no training batch, so its loss shows what a run has learnt, even if its last
    training batches were corrupted.
    """

    train: np.ndarray
    """Text for the training batches."""
    held_out: np.ndarray
    """Every tenth file."""
    files: int
    """Number of files read."""


def load_corpus() -> Corpus:
    """Reads the modules of the standard library, a text that every machine has.

    Returns:
        At most 4 MiB of text. The files are in the order of their names, so that all runs of a
        machine have the same batches.

    Raises:
        DemoError: there are too few sources, as in a stripped Python.
    """
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(root.glob("*.py"), key=lambda path: path.name)
    train: list[bytes] = []
    held_out: list[bytes] = []
    size = 0
    for index, path in enumerate(paths):
        text = path.read_bytes()
        size += len(text)
        if size > _MAX_CORPUS_BYTES:
            break
        if index % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1:
            held_out.append(text)
        else:
            train.append(text)
    if len(held_out) < 1 or size < 10_000:
        raise DemoError(
            f"the demo trains on the standard library's sources, and {root} holds {len(paths)} of "
            f"them with {size} bytes: use a Python that was installed with its .py files"
        )
    return Corpus(
        train=np.frombuffer(b"".join(train), np.uint8),
        held_out=np.frombuffer(b"".join(held_out), np.uint8),
        files=len(train) + len(held_out),
    )


class Step(NamedTuple):
    """One training step, as a training function reports it.

    A step that a rollback repeats is reported again, with the same `step`.
    """

    step: int
    """Index of the step, from 0."""
    batch: int
    """Index of the batch; larger than `step` after a rollback that skipped batches."""
    loss: float
    """Loss before the update."""
    grad_norm: float
    """Global L2 norm before clipping."""


class TokenBatch(NamedTuple):
    """The batch of one step: text for a model that predicts the next byte.

    The mean loss divides by the sum of `weights`. In a batch that is all padding this is 0/0, which
    is the demo's third fault.
    """

    tokens: np.ndarray
    """int32 (batch, context + 1): inputs are all but the last token, targets all but the first."""
    weights: np.ndarray
    """float32 (batch, context): weight of each target in the mean loss; 0 for padding."""


@dataclass(frozen=True)
class Scenario:
    """Data, model size, learning rates and faults of one run.

    The same scenario is given to every framework and arm, so that the runs differ in their
    protection only. All values follow from indices of batches and steps, never from the state of a
    generator, so that a repeated step gets the same batch.
    """

    corpus: Corpus
    """Text for training and evaluation."""
    steps: int = 300
    """Steps of a run."""
    batch: int = 16
    """Sequences in a batch."""
    context: int = 64
    """Bytes in a sequence."""
    layers: int = 3
    """Layers of the transformer."""
    width: int = 64
    """Width of the transformer."""
    heads: int = 4
    """Attention heads of each layer."""
    peak_rate: float = 8e-3
    """The intended learning rate, the highest with which this model trains well."""
    lr_factor: float = 16.0
    """Factor on the learning rate in `wrong_lr_steps`."""
    weight_decay: float = 0.1
    """Weight decay of AdamW."""

    def __post_init__(self) -> None:
        if self.steps < MIN_STEPS:
            raise DemoError(
                f"steps must be at least {MIN_STEPS}, or the faults overlap, got {self.steps}"
            )

    # -- the faults, at fixed parts of the run --------------------------------------------------

    @cached_property
    def corrupted_batches(self) -> frozenset[int]:
        """Indices of the batches that are random bytes: two at 20 % and two at 62 % of the run.

        Two in a row, because a broken shard holds more than one batch.
        """
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
        """Computes the learning rate of a step.

        Args:
            step: index of the step, from 0.

        Returns:
            A warm-up of 20 steps, then a cosine to 2 % of the peak. In `wrong_lr_steps` the rate is
            `lr_factor` times too high.
        """
        rate = self.peak_rate * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * step / self.steps)))
        rate *= min(1.0, (step + 1) / 20)
        if step in self.wrong_lr_steps:
            rate *= self.lr_factor
        return rate

    def training_batch(self, index: int) -> TokenBatch:
        """Makes a training batch, including its fault if it has one.

        Args:
            index: index of the batch, from 0. The same index always gives the same batch.

        Returns:
            `batch` windows of `context` + 1 bytes, at random places of the training text.
        """
        random = np.random.default_rng([0, index])
        tokens = self._windows(self.corpus.train, self.batch, random)
        weights = np.ones((self.batch, self.context), np.float32)
        if index in self.corrupted_batches:
            tokens = random.integers(0, SYMBOLS, tokens.shape, np.int32)
        if index == self.empty_batch:
            weights[:] = 0.0
        return TokenBatch(tokens, weights)

    def held_out_batch(self) -> TokenBatch:
        """Makes the batch for the evaluation at the end of a run.

        Returns:
            Held-out text of 8 batches in one, the same for all runs.
        """
        random = np.random.default_rng(0)
        tokens = self._windows(self.corpus.held_out, 8 * self.batch, random)
        return TokenBatch(tokens, np.ones((len(tokens), self.context), np.float32))

    def _windows(self, text: np.ndarray, count: int, random: np.random.Generator) -> np.ndarray:
        starts = random.integers(0, len(text) - self.context, count)
        return text[starts[:, None] + np.arange(self.context + 1)].astype(np.int32)

    # -- the model, as plain arrays -------------------------------------------------------------

    def initial_weights(self) -> dict[str, np.ndarray]:
        """Makes the initial weights, the same for both frameworks.

        Returns:
            Float32 arrays (inputs, outputs) by name: "embed", "qkv0", "out0", "up0", "down0", ...
            and "head".
        """
        random = np.random.default_rng([0, 1 << 32])
        width = self.width
        sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1)}
        shapes: dict[str, tuple[int, int]] = {}
        for layer in range(self.layers):
            for name, (inputs, outputs) in sizes.items():
                shapes[f"{name}{layer}"] = (width * inputs, width * outputs)
        shapes["head"] = (width, SYMBOLS)
        weights = {"embed": random.normal(size=(SYMBOLS, width)).astype(np.float32)}
        for name, shape in shapes.items():
            limit = shape[0] ** -0.5
            weights[name] = random.uniform(-limit, limit, shape).astype(np.float32)
        return weights

    def rotations(self) -> tuple[np.ndarray, np.ndarray]:
        """Computes the rotary position embedding (arXiv:2104.09864).

        Returns:
            Cosine and sine of the angles, float32 (context, half of the width of a head).
        """
        half = self.width // self.heads // 2
        angles = np.arange(self.context)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


# -- the training -------------------------------------------------------------------------------


class DemoTraining:
    """The model and the optimizer of one run. A framework implements it.

    The model is a transformer of bytes with rotary attention and a GELU MLP, without normalisation.
    The frameworks differ in the five functions of which `loss` is made.
    """

    scenario: Scenario
    """The sizes of the model, the data and the faults."""
    state: Any
    """What the Healer saves."""
    healer: Any = None
    """The Healer of a healed run."""
    array: Any
    """Makes an array of the framework of a NumPy array."""
    concatenate: Any
    """Concatenates arrays along an axis."""
    gelu: Any
    """The activation function, approximated by tanh."""
    attention: Any
    """Causal attention of queries, keys and values, (batch, time, heads, width of a head)."""
    cross_entropy: Any
    """Cross-entropy in nats of logits (batch, time, 256) and targets (batch, time)."""

    def loss(self, weights: Any, batch: Any) -> Any:
        """Mean cross-entropy over the targets that count, in nats. NaN without such a target.

        Args:
            weights: the parameters by name.
            batch: the tokens, and the weight of each target.
        """
        tokens, counts = map(self.array, batch)
        cos, sin = (self.array(each)[:, None] for each in self.scenario.rotations())
        half = cos.shape[-1]

        def rotated(x: Any) -> Any:
            a, b = x[..., :half], x[..., half:]
            return self.concatenate((a * cos - b * sin, a * sin + b * cos), -1)

        x = weights["embed"][tokens[:, :-1]]
        for layer in range(self.scenario.layers):
            heads = (x @ weights[f"qkv{layer}"]).reshape(*x.shape[:2], 3, -1, 2 * half)
            q, k, v = heads[:, :, 0], heads[:, :, 1], heads[:, :, 2]
            mixed = self.attention(rotated(q), rotated(k), v).reshape(x.shape)
            x = x + mixed @ weights[f"out{layer}"]
            x = x + self.gelu(x @ weights[f"up{layer}"]) @ weights[f"down{layer}"]
        each = self.cross_entropy(x @ weights["head"], tokens[:, 1:])
        return (each * counts).sum() / counts.sum()

    def loss_fn(self, *args: Any) -> Any:
        """The `loss_fn` of the Healer."""
        raise NotImplementedError

    def step(self, index: int, rate: float) -> tuple[Any, Any]:
        """Trains one step.

        Args:
            index: index of the batch.
            rate: the learning rate.

        Returns:
            The loss and the norm of the gradients before clipping.
        """
        raise NotImplementedError

    def held_out_loss(self) -> float:
        """The loss on the held-out batch in nats, which may be NaN."""
        raise NotImplementedError


def train(
    make: Callable[[Scenario, str, Any], DemoTraining],
    scenario: Scenario,
    arm: str,
    policy: Any,
    folder: Path,
    on_step: Callable[[Step], object],
) -> float:
    """Trains one model, and returns the loss on the held-out batch.

    Args:
        make: makes the training of a framework.
        scenario: the data, the model's size and the faults of the run.
        arm: "healed", "fixed clip", or any other name for a run without either.
        policy: the policy of the healed run.
        folder: where the healed run writes checkpoints and events.
        on_step: called with each step. A rollback decreases the step's number.
    """
    training = make(scenario, arm, policy)
    batches = range(scenario.steps)
    healer = None
    with suppress(RunStopped), ExitStack() as stack:
        if arm == "healed":
            healer = stack.enter_context(  # <- healcore
                Healer(
                    policy,
                    state=training.state,
                    store=folder / "checkpoints",
                    logging=Logging(events=folder / "events.jsonl"),
                    loss_fn=training.loss_fn,
                    checkpoints=Checkpoints(every=SAVE_EVERY),
                )
            )
            training.healer = healer
        for index in healer.batches(batches) if healer else batches:  # <- healcore
            step = healer.step if healer else index  # <- healcore
            loss, norm = training.step(index, scenario.learning_rate(step))
            on_step(Step(step, index, float(loss), float(norm)))
    return training.held_out_loss()
