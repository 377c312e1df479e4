"""Rewinds the train dataloader of a `transformers.Trainer` to any batch of any epoch."""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves

from healcore.runtime.data import DataError
from healcore.runtime.data.loader_adapters import iterate

_END = object()


class RewindableBatches:
    """Yields the batches of Trainer's own dataloader, and can rewind to an earlier one.

    The order of an epoch follows from its number and from the random numbers that its sampler
    draws. Both are recorded when an epoch begins. To rewind, both are set again, and the batches
    before the position are skipped by index, without reading the data. So the order is Trainer's,
    whatever the sampler: accelerate's seeded one, GRPO's, groups by length, or shards over ranks.

    A collator that draws random numbers in the main process draws new ones after a rewind, because
    accelerate reads one batch ahead. An IterableDataset that begins again with the same first batch
    is read from its beginning, and the batches before the position are dropped. Any other (a
    generator, or a stream in random order) cannot be rewound and continues forward.

    Attributes:
        epoch: epoch of the next batch, from 0.
        index: index of the next batch in its epoch.
    """

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self.epoch = 0
        self.index = 0
        self._random: dict[str, Any] | None = None
        """The random state at the beginning of this epoch, or None before its beginning."""
        self._loaded = False
        self._streams = isinstance(
            getattr(loader, "dataset", None), torch.utils.data.IterableDataset
        )
        self._firsts: dict[int, str] = {}
        """Epoch -> digest of its first batch, for an IterableDataset."""
        self._running: Iterator[Any] | None = None
        self._begun: Iterator[Any] | None = None
        """The rest of an epoch that `_check_begins_again` has begun."""
        self._rest: Iterator[Any] | None = None
        """What `_check_begins_again` has read of a stream that does not begin again, or None.

        Not closed before its end: a generator would end with an iterator that delegates to it.
        """

    def __len__(self) -> int:
        """The batches of an epoch; TypeError if the loader does not know."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch after `load_state_dict`, otherwise the next one."""
        if self._loaded:
            self._loaded = False
            if self._running is not None:
                return self._running
        elif self.index:
            self._next_epoch()
        self._running = self._batches()
        return self._running

    def state_dict(self) -> dict[str, Any]:
        """The position of the next batch."""
        first = self._firsts.get(self.epoch)
        return {"epoch": self.epoch, "index": self.index, "random": self._random, "first": first}

    def advanced(self, state: Mapping[str, Any], count: int) -> dict[str, Any]:
        """The position `count` batches later in the same epoch."""
        return {**state, "index": state["index"] + count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes a position for the next `iter`.

        Raises:
            DataError: the data do not begin again. The position has not changed then.
        """
        epoch, index = int(state["epoch"]), int(state["index"])
        here = (epoch, index) == (self.epoch, self.index)
        if not (self._streams and here):
            first = self._firsts.get(epoch, state.get("first"))
            if self._streams and first is not None:
                self._check_begins_again(epoch, state["random"], first)
                self._firsts[epoch] = first
            self.epoch, self.index, self._random = epoch, index, state["random"]
            self._running = None
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
        begun, self._begun = self._begun, None
        if begun is None:
            batches = iterate(self._from(self.index))
        else:
            batches = itertools.islice(begun, self.index, None)
        while True:
            try:
                batch = next(batches, _END)
                if batch is _END and self._rest is not None:
                    batch = next(self._rest, _END)
                if batch is _END:
                    break
            finally:
                if again:  # the sampler has drawn its order now
                    _set_random_state(now, [])
                    again = False
            if self._streams and not self.index:
                self._firsts[self.epoch] = _digest(batch)
            self.index += 1
            yield batch
        self._running = None
        self._next_epoch()

    def _check_begins_again(self, epoch: int, drawn: Mapping[str, Any] | None, first: str) -> None:
        """Begins an epoch of an IterableDataset; DataError if its first batch differs."""
        problem = "the train_dataset is an IterableDataset that does not begin again as it did"
        if self._rest is not None:
            raise DataError(problem)
        generators = _generators(self._loader)
        now = _random_state(generators)
        self._set_epoch(epoch)
        if drawn is not None:
            _set_random_state(drawn, generators)
        batches = iterate(self._loader)
        batch = next(batches, _END)
        _set_random_state(now, generators)
        if batch is not _END and _digest(batch) == first:
            self._begun = itertools.chain([batch], batches)
            return
        self._set_epoch(self.epoch)
        self._rest = batches if batch is _END else itertools.chain([batch], batches)
        raise DataError(problem)

    def _set_epoch(self, epoch: int | None = None) -> None:
        """Calls `set_epoch` as `Trainer._run_epoch` does it."""
        inner = getattr(getattr(self._loader, "batch_sampler", None), "batch_sampler", None)
        for each in (self._loader, inner):
            set_epoch = getattr(each, "set_epoch", None)
            if set_epoch is not None:
                set_epoch(self.epoch if epoch is None else epoch)

    def _from(self, index: int) -> Any:
        if not index:
            return self._loader
        if isinstance(self._loader, torch.utils.data.DataLoader):
            from accelerate import skip_first_batches

            return skip_first_batches(self._loader, index)
        return itertools.islice(self._loader, index, None)


def _digest(batch: Any) -> str:
    """A digest of the values of a batch. A sync if they are on an accelerator."""
    found = hashlib.blake2b(digest_size=16)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().cpu().contiguous().reshape(-1)
            found.update(flat.view(torch.uint8).numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()


def _generators(loader: Any) -> list[torch.Generator]:
    """The generators of a loader and its samplers, including those in accelerate's shards."""
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
    """The states of all generators that a sampler may draw from, all on the host."""
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
