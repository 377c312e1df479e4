"""Rewinds the train dataloader of a `transformers.Trainer` to any batch of any epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from healcore.runtime.data import DataError
from healcore.runtime.data.loader_adapters import iterate

_END = object()


class RewindableBatches:
    """Yields the batches of Trainer's own dataloader, and can rewind to an earlier batch.

    The order of an epoch follows from its number and from the random numbers that its sampler
    draws. Both are recorded when an epoch begins. A rewind restores both, and skips the batches
    before the position by index, without reading the data. Therefore the order is Trainer's for any
    sampler: accelerate's seeded sampler, GRPO's, groups by length, or shards over ranks.

    A collator that draws random numbers in the main process draws new numbers after a rewind,
    because accelerate reads one batch ahead. An IterableDataset continues forward after a rollback.
    After a restart it is read from its beginning, and the used batches are dropped.

    Attributes:
        epoch: epoch of the next batch, from 0.
        index: index of the next batch in its epoch, from 0.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = 0
        self.index = 0
        self._random: dict[str, Any] | None = None
        """The random state at the beginning of this epoch, or None before its beginning."""
        self._loaded = False
        dataset = getattr(loader, "dataset", None)
        self._is_stream = isinstance(dataset, torch.utils.data.IterableDataset)
        self._begun = False
        """Whether this process has read a batch."""
        self._running: Iterator[Any] | None = None

    def __len__(self) -> int:
        """The number of batches of an epoch; TypeError if unknown."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """Yields the rest of the epoch after `load_state_dict`, otherwise the next epoch."""
        if self._loaded:
            self._loaded = False
            if self._running is not None:
                return self._running
        elif self.index:
            self._next_epoch()
        self._running = self._batches()
        return self._running

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of the next batch."""
        return {"epoch": self.epoch, "index": self.index, "random": self._random}

    def advanced(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        """Returns the position `count` batches later in the same epoch."""
        return {**state, "index": state["index"] + count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position for the next `iter`.

        Raises:
            DataError: the data cannot be rewound. The position is unchanged.
        """
        epoch, index = int(state["epoch"]), int(state["index"])
        unmoved = (epoch, index) == (self.epoch, self.index)
        if self._is_stream and self._begun and not unmoved:
            raise DataError("the train_dataset is an IterableDataset, which cannot be rewound")
        if not (self._is_stream and unmoved):
            self.epoch, self.index, self._random = epoch, index, state["random"]
            self._running = None
        self._loaded = True

    def _next_epoch(self) -> None:
        self.epoch, self.index, self._random = self.epoch + 1, 0, None

    def _batches(self) -> Iterator[Any]:
        self._set_epoch()
        generators = _generators(self._loader)
        current = _random_state(generators)
        repeats, self._random = self._random is not None, self._random or current
        if repeats:
            _set_random_state(self._random, generators)
        batches = iterate(self._skip_to(self.index))
        while True:
            try:
                batch = next(batches, _END)
                if batch is _END:
                    break
            finally:
                if repeats:  # the sampler has drawn its order
                    _set_random_state(current, [])
                    repeats = False
            self._begun = True
            self.index += 1
            yield batch
        self._running = None
        self._next_epoch()

    def _set_epoch(self) -> None:
        """Calls `set_epoch` on the same objects as `Trainer._run_epoch`."""
        inner = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for owner in (self._loader, inner):
            set_epoch = getattr(owner, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)

    def _skip_to(self, index: int) -> Any:
        if not index:
            return self._loader
        if isinstance(self._loader, torch.utils.data.DataLoader):
            from accelerate import skip_first_batches

            return skip_first_batches(self._loader, index)
        return itertools.islice(self._loader, index, None)


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, including those in accelerate's shards."""
    generators: dict[int, torch.Generator] = {}
    parts = [loader]
    for part in parts:
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not other for other in parts):
                parts.append(inner)
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            generators[id(generator)] = generator
    return list(generators.values())


def _random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """The states of the global generators on the host and of `generators`."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global generator)
        "torch": torch.get_rng_state(),
        "generators": [generator.get_state() for generator in generators],
    }


def _set_random_state(state: Mapping[str, Any], generators: list[torch.Generator]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    # The lists may differ: accelerate's sampler creates its generator when it begins an epoch, and
    # seeds it by the epoch.
    for generator, saved in zip(generators, state["generators"], strict=False):
        generator.set_state(saved)
