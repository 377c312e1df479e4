"""Passes the batches of a Healer to Lightning's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from healcore.runtime.data import EmptyLoader
from healcore.runtime.data.loader_adapters import (
    TolerantIterator,
    UnreadableBatch,
    why_no_state,
)
from healcore.runtime.data.torch_loader import TorchLoader, is_replayable, recorded
from healcore.runtime.healer import Healer
from healcore.torch.trainers.lightning.progress import Progress

_END = object()


class Feed:
    """Replaces `trainer.fit_loop._data_fetcher`, with the attributes that Lightning's loops use.

    Lightning requests the next batch between two steps. The Healer then saves, rolls back or ends
    the run.

    Attributes:
        loader: the loader that the Healer reads, or None before the first batch.
        fetched: number of batches of this epoch so far.
        done: whether the last fetched batch is the last batch of its epoch.
        length: number of batches per epoch, or None if unknown.
        nothing_to_do: whether the run in the store is complete.
    """

    def __init__(
        self,
        trainer: Any,
        fetcher: Any,
        progress: Progress,
        open_healer: Callable[[Any, bool], Healer[Any]],
    ) -> None:
        self._fetcher = fetcher
        self._progress = progress
        self._open = open_healer
        self._trainer = trainer
        length = trainer.fit_loop.max_batches
        self.length = None if length == float("inf") else int(length)
        self._loop = trainer.fit_loop.epoch_loop
        self.loader: TrainLoader | None = None
        self.fetched = 0
        self.done = False
        self.nothing_to_do = False
        self._done_before = 0
        """Number of batches of the first epoch that precede Lightning's checkpoint."""
        self._healer: Healer | None = None
        self._batches: Iterator[TrainBatch] | None = None
        self._start_profiler: Callable[[], None] = lambda: None
        self._stop_profiler: Callable[[], None] = lambda: None

    @property
    def combined_loader(self) -> Any:
        """Lightning's loader of all train dataloaders."""
        return self._fetcher.combined_loader

    def __iter__(self) -> Feed:
        """Begins an epoch. Lightning calls this before every epoch except the first."""
        if self.loader is None:
            iter(self._fetcher)  # Lightning begins reloaded dataloaders twice
        elif self.fetched and not self.done:
            self._batches = None  # the epoch ended early: the Healer begins the next epoch
        self.fetched, self.done = 0, False
        return self

    def __next__(self) -> tuple[Any, int, int]:
        self._start_profiler()
        try:
            return self._next()
        except (StopIteration, EmptyLoader):
            self.done = True
            raise StopIteration from None
        finally:
            self._stop_profiler()

    def _next(self) -> tuple[Any, int, int]:
        if self.loader is None:  # created here, after Lightning has loaded its own checkpoint
            self._done_before = self._loop.batch_progress.current.ready
            self.loader = TrainLoader(self._fetcher, self.length, self._done_before)
        if self._healer is None:
            self._healer = self._open(self._trainer, self.loader.why_not is None)
            had_completed = self._healer.run.data.had_completed
            self.nothing_to_do = self._progress.is_complete(had_completed=had_completed)
            if self.nothing_to_do:
                raise StopIteration
        if self._batches is None:
            # One iterator for all epochs, because a rollback may return to an earlier epoch.
            self._batches = self._healer.batches(self.loader, epochs=None)
        batch = next(self._batches)
        if len(self._healer.run.data.unused) == 1:
            self._progress.begin_step()
        self.fetched += 1
        loaders = self._healer.run.data.loaders
        number = loaders.number(self.loader)
        ends = number is not None and loaders[number].is_last()
        self.done = batch.is_last or ends or self._belongs_to_next_epoch()
        if self.done and self.length is not None:
            self._progress.count_skipped(self.length)
        return batch.fetched

    def _belongs_to_next_epoch(self) -> bool:
        """Whether the batch belongs to the next epoch, because the rest of this one is unreadable.

        Lightning's current epoch then ends after this batch, because its last step and its
        validation have to follow a batch.
        """
        assert self._healer is not None
        batch = self._healer.run.data.unused[-1]
        count = self._loop.batch_progress.current.ready
        if not batch.epoch:
            count -= self._done_before
        return batch.index < count

    def reset(self) -> None:
        """Resets the counts, as Lightning's data fetcher does."""
        self.fetched, self.done = 0, False

    def teardown(self) -> None:
        """Shuts down the workers of the dataloaders."""
        self._batches = None
        self._fetcher.teardown()


class TrainBatch(NamedTuple):
    """An item of `TrainLoader`."""

    fetched: tuple[Any, int, int]
    """Batch, batch index and dataloader index, as from Lightning's `CombinedLoader`."""
    is_last: bool
    """Whether the batch is known to be the last of its epoch."""


class TrainLoader:
    """Lightning's train dataloaders as one loader, within `limit_train_batches`.

    If the length is unknown, reads one batch ahead, because Lightning has to know which batch is
    the last.

    Args:
        fetcher: Lightning's data fetcher, which has begun the first epoch.
        length: number of batches per epoch, or None if unknown.
        done: number of batches of the first epoch that precede Lightning's checkpoint.

    Attributes:
        length: number of batches of the current epoch, or None if unknown.
        why_not: reason why the loader cannot be rewound, or None.
    """

    def __init__(self, fetcher: Any, length: int | None, done: int = 0) -> None:
        self._combined = fetcher.combined_loader
        # iter(combined) would restart the epoch with other random numbers.
        rest = iter(self._combined.__next__, _END)
        first_epoch: Iterator[Any] = chain(getattr(fetcher, "batches", ()), rest)
        loaders = self._combined.flattened
        self._only: Any = loaders[0] if len(loaders) == 1 else None
        self._plain: TorchLoader | None = None
        if is_replayable(self._only) and recorded(self._only) is self._only:
            self._plain = TorchLoader(self._only, begin=lambda: iter(self._combined))
            first_epoch = self._plain.adopt(first_epoch)
        self._first_epoch: Iterator[Any] | None = first_epoch
        self._index = 0
        self._full_length = length
        self.length = None if length is None else max(length - done, 0)
        self._loaded: Mapping[str, Any] | None = None
        self.why_not = self._why_not()
        # The Healer saves the generators of these samplers, and calls their `set_epoch`.
        self.sampler = getattr(self._only, "sampler", None)
        self.batch_sampler = getattr(self._only, "batch_sampler", None)
        self.dataset = getattr(self._only, "dataset", None)

    def __len__(self) -> int:
        """The number of batches of the current epoch; TypeError if unknown."""
        if self.length is None:
            raise TypeError("the train dataloader has no length")
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Yields a `TrainBatch`, or an `UnreadableBatch` for a batch that cannot be read."""
        batches = TolerantIterator(self._begin())
        if self.length is not None:
            for fetched in islice(batches, self.length - self._index):
                self._index += 1
                yield _train_batch(fetched, False)
            return
        ahead: Any = next(batches, _END)
        while ahead is not _END:
            fetched, ahead = ahead, next(batches, _END)
            self._index += 1
            yield _train_batch(fetched, ahead is _END)

    def state_dict(self) -> dict[str, Any]:
        """Returns the position of a dataloader that can be rewound."""
        state = self._only.state_dict() if self._plain is None else self._plain.state()
        return {"loader": state, "index": self._index, "length": self.length}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the position for the next `iter`."""
        if self._plain is None:
            self._only.load_state_dict(state["loader"])
        else:
            self._plain.resume(state["loader"], 0)
        self._loaded, self._first_epoch = state, None

    def _begin(self) -> Iterator[Any]:
        """The batches of the next epoch, or the rest of an epoch that is begun or loaded."""
        loaded, self._loaded = self._loaded, None
        first_epoch, self._first_epoch = self._first_epoch, None
        if first_epoch is not None:
            return first_epoch
        self._index, self.length = 0, self._full_length
        if loaded is not None:
            self._index, self.length = loaded["index"], loaded["length"]
        if self._plain is None:
            return iter(self._combined)
        return self._plain.start() if loaded is None else self._plain

    def _why_not(self) -> str | None:
        if self._only is None:
            return "the fit has several train dataloaders, and only one can be rewound"
        if self.length is None:
            return "the train dataloader has no length, so one batch is always read ahead"
        if self._plain is not None:
            return None
        return why_no_state(self._only)


def _train_batch(fetched: Any, is_last: bool) -> TrainBatch | UnreadableBatch:
    return fetched if isinstance(fetched, UnreadableBatch) else TrainBatch(fetched, is_last)
