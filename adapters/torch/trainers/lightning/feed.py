"""Feeds the batches of a Healer to Lightning's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from healcore.runtime.data.epoch_reader import EmptyLoader
from healcore.runtime.healer import Healer
from healcore.torch.trainers.lightning.progress import Progress
from healcore.torch.trainers.lightning.train_loader import TrainBatch, TrainLoader


class Feed:
    """Takes the place of `trainer.fit_loop._data_fetcher` and has the attributes that loops use.

    The next batch is the moment between two steps: a Healer saves, goes back or ends the run there.

    Attributes:
        loader: what the Healer reads; None before the first batch.
        fetched: batches of this epoch so far.
        done: whether the batch fetched last is the last one of its epoch.
        length: batches per epoch; None if it is not known.
        nothing_to_do: the run in the store was complete.
    """

    def __init__(
        self,
        trainer: Any,
        fetcher: Any,
        progress: Progress,
        open_healer: Callable[[Feed], Healer[Any]],
    ) -> None:
        self._fetcher = fetcher
        self._progress = progress
        self._open = open_healer
        length = trainer.fit_loop.max_batches
        self.length = None if length == float("inf") else int(length)
        self._loop = trainer.fit_loop.epoch_loop
        self.loader: TrainLoader | None = None
        self.fetched = 0
        self.done = False
        self.nothing_to_do = False
        self._done_before = 0
        """Batches of the first epoch that a checkpoint of Lightning's has been through."""
        self._healer: Healer | None = None
        self._batches: Iterator[TrainBatch] | None = None
        self._start_profiler: Callable[[], None] = lambda: None
        self._stop_profiler: Callable[[], None] = lambda: None

    @property
    def combined_loader(self) -> Any:
        """Lightning's loader of all train dataloaders."""
        return self._fetcher.combined_loader

    def __iter__(self) -> Feed:
        """Called by Lightning before every epoch but the first."""
        if self.loader is None:
            iter(self._fetcher)  # dataloaders that were reloaded: Lightning begins them twice
        elif self.fetched and not self.done:
            self._batches = None  # the epoch was left early: the Healer begins the next one
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
        if self.loader is None:  # now Lightning knows what a checkpoint of its own has been through
            self._done_before = self._loop.batch_progress.current.ready
            self.loader = TrainLoader(self._fetcher, self.length, self._done_before)
        if self._healer is None:
            self._healer = self._open(self)
            had_completed = self._healer.had_completed
            self.nothing_to_do = self._progress.is_complete(had_completed=had_completed)
            if self.nothing_to_do:
                raise StopIteration
        if self._batches is None:
            # One iteration over all epochs: a rollback may lead into an earlier one.
            self._batches = self._healer.batches(self.loader, epochs=None)
        batch = next(self._batches)
        if len(self._healer.unused) == 1:
            self._progress.begin_step()
        self.fetched += 1
        length = self.loader.length
        ends = length is not None and self._healer.is_last_batch(length)
        self.done = batch.is_last or ends or self._is_of_next_epoch()
        if self.done and self.length is not None:
            self._progress.count_left_out(self.length)
        return batch.fetched

    def _is_of_next_epoch(self) -> bool:
        """Whether no batch after the last one in this epoch was readable.

        This is known too late to end Lightning's epoch before: it ends with the first batch of the
        next one, as its last step and its validation have to follow a batch.
        """
        assert self._healer is not None
        which = self._healer.unused[-1]
        before = self._loop.batch_progress.current.ready
        if not which.epoch:
            before -= self._done_before
        return which.index < before

    def reset(self) -> None:
        """Begins to count again, as Lightning's data fetcher does."""
        self.fetched, self.done = 0, False

    def teardown(self) -> None:
        """Shuts the workers of the dataloaders down."""
        self._batches = None
        self._fetcher.teardown()
