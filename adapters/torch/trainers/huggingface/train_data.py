"""The train dataloader of a `transformers.Trainer`, begun again at any batch of any epoch."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch


class RewindableBatches:
    """Gives the batches of Trainer's own dataloader, and can go back to an earlier one.

    The order of an epoch follows from its number and from the random numbers that its sampler
    draws. Both are recorded when an epoch begins, and set again to come back into it; the batches
    before the position are then left out by their indices, without reading the data. So the order
    is the one that Trainer itself would have, whatever the sampler: accelerate's seeded one, that
    of GRPO, groups by length, or shards over ranks.

    A collator that draws random numbers in the main process draws new ones after a rewind, because
    accelerate reads one batch ahead. An IterableDataset has to begin again with the same data; its
    batches before the position are read and dropped.

    Attributes:
        epoch: of the next batch, from 0.
        index: of the next batch in its epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = 0
        self.index = 0
        self._random: dict[str, Any] | None = None
        """The random state at the beginning of this epoch; None: it has not begun."""
        self._loaded = False

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after `load_state_dict`, otherwise the next one."""
        if self._loaded:
            self._loaded = False
        elif self.index:
            self._next_epoch()
        return self._batches()

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        return {"epoch": self.epoch, "index": self.index, "random": self._random}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a position for the next `iter`."""
        self.epoch, self.index = int(state["epoch"]), int(state["index"])
        self._random = state["random"]
        self._loaded = True

    def _next_epoch(self) -> None:
        self.epoch, self.index, self._random = self.epoch + 1, 0, None

    def _batches(self) -> Iterator[Any]:
        self._set_epoch()
        generators = _generators(self._loader)
        now = _random_state(generators)
        again, self._random = self._random is not None, self._random or now
        if again:
            _set_random_state(self._random, generators)
        batches = iter(self._from(self.index))
        while True:
            try:
                batch = next(batches)
            except StopIteration:
                break
            finally:
                if again:  # the sampler has drawn its order now
                    _set_random_state(now, [])
                    again = False
            self.index += 1
            yield batch
        self._next_epoch()

    def _set_epoch(self) -> None:
        """As `Trainer._run_epoch` does it."""
        inner = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for each in (self._loader, inner):
            set_epoch = getattr(each, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch)

    def _from(self, index: int) -> Any:
        if not index:
            return self._loader
        if isinstance(self._loader, torch.utils.data.DataLoader):
            from accelerate import skip_first_batches

            return skip_first_batches(self._loader, index)
        return itertools.islice(self._loader, index, None)


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and of its samplers, those within accelerate's shards too."""
    found: dict[int, torch.Generator] = {}
    parts = [loader]
    for part in parts:
        for name in ("sampler", "batch_sampler"):
            inner = getattr(part, name, None)
            if inner is not None and all(inner is not each for each in parts):
                parts.append(inner)
        generator = getattr(part, "generator", None)
        if isinstance(generator, torch.Generator):
            found[id(generator)] = generator
    return list(found.values())


def _random_state(generators: list[torch.Generator]) -> dict[str, Any]:
    """The states that a sampler may draw from: all on the host."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(),  # noqa: NPY002 (the global one)
        "torch": torch.get_rng_state(),
        "generators": [each.get_state() for each in generators],
    }


def _set_random_state(state: Mapping[str, Any], generators: list[torch.Generator]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    # accelerate's sampler makes its generator when it begins, and seeds it by the epoch.
    for generator, own in zip(generators, state["generators"], strict=False):
        generator.set_state(own)
