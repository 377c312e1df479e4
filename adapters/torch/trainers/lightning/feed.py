"""`Feed`: passes the batches of a Healer to Lightning's training loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from healcore.core.errors import AttachError
from healcore.runtime.data import EmptyLoader
from healcore.runtime.data.readers import (
    Reader,
    RewindObstacle,
    UnreadableBatch,
    catch_unreadable,
)
from healcore.runtime.data.torch_reader import EPOCH_BEGUN
from healcore.torch.trainers.lightning import trainer_internals as internals
from healcore.torch.trainers.lightning.progress import Progress
from healcore.torch.trainers.lightning.trainer_internals import (
    Batch,
    CombinedLoader,
    Fetcher,
    LightningTrainer,
)

_END = object()


class Feed:
    """Lightning's data fetcher of a fit, which passes the batches of a Healer.

    Lightning requests the next batch between two steps. The Healer then saves, rolls back or ends
    the run. The Healer reads the train dataloader itself. Several dataloaders, and a dataloader
    without a length, are read through `CombinedBatches` and cannot be rewound.

    Args:
        trainer: the Trainer.
        progress: the counters of the fit.

    Attributes:
        fetched: number of batches of this epoch so far.
        done: whether the last fetched batch is the last batch of its epoch.
    """

    def __init__(self, trainer: LightningTrainer, progress: Progress) -> None:
        self._fit = trainer.fit_loop
        self._progress = progress
        self._loader: Any = None
        """The loader that the Healer reads, or None before the first batch."""
        self._length: Any = None
        """Number of batches of an epoch, or None if unknown."""
        self._batches: Any = None
        self._begun = False
        self.fetched = 0
        self.done = False
        self._start_profiler: Callable[[], None]  # set by Lightning
        self._stop_profiler: Callable[[], None]

    def setup(self, combined_loader: CombinedLoader, *, begun: bool = False) -> None:
        """Receives Lightning's loader of all train dataloaders.

        Lightning calls this when a fit begins and when it has made its dataloaders again, and then
        asks the loader for its length. The Healer reads the dataloaders themselves.

        Args:
            combined_loader: Lightning's loader, which may have other dataloaders than before.
            begun: whether another fetcher has begun the epoch, as a search of a rate does.
        """
        for loader in combined_loader.flattened:
            if begun and isinstance(loader, DataLoader):
                vars(loader)[EPOCH_BEGUN] = True
        self.combined_loader = combined_loader
        internals.make_length_known(combined_loader)

    def __iter__(self) -> Feed:
        """Begins an epoch."""
        if self._loader is None and self._begun:
            iter(self.combined_loader)  # Lightning begins reloaded dataloaders twice, which draws
        self._begun = True
        if self.fetched and not self.done:
            self._batches = None  # the epoch ended early: the Healer begins the next epoch
        self.reset()
        return self

    def __next__(self) -> tuple[Batch, int, int]:
        """The next batch, its index in the epoch, and 0 as the index of its dataloader.

        Raises:
            StopIteration: the epoch has no further batch.
        """
        self._start_profiler()
        try:
            return self._next()
        except (StopIteration, EmptyLoader):
            self.done = True
            raise StopIteration from None
        finally:
            self._stop_profiler()

    def _next(self) -> tuple[Batch, int, int]:
        """Reads a batch, and opens the run before the first batch."""
        batch_progress = self._fit.epoch_loop.batch_progress
        if self._loader is None:
            self._open()
        access = self._progress.access
        assert access is not None
        if self._batches is None:
            # One iterator for all epochs, because a rollback may return to an earlier epoch.
            limit = None
            if self._length is not None:
                limit = self._length_of
            self._batches = access.batches(self._loader, limit)
        batch = next(self._batches)
        if len(access.pending) == 1:
            self._progress.before = batch_progress.state_dict()
        self.fetched += 1
        is_last = access.ends_epoch or getattr(self._loader, "exhausted", False)
        # If the rest of this epoch is unreadable, the batch is already of the next epoch. It ends
        # this epoch, because Lightning's last step and validation have to follow a batch.
        epoch, index = access.pending[-1]
        ready = batch_progress.current.ready
        if epoch == 0:
            ready -= self._progress.trained_before
        self.done = is_last or index < ready
        if self.done and self._length is not None:
            # Lightning validates at the end of an epoch only if its count reaches the length.
            missing = self._length - 1 - batch_progress.current.ready
            batch_progress.increment_by(max(missing, 0))
        return self.as_passed(batch), index, 0

    def _open(self) -> None:
        """Opens the run, and chooses the loader that the Healer reads.

        Called before the first batch, when Lightning has loaded its own checkpoint.
        """
        if self._progress.saved_limits is None:  # the store has no run to continue
            ready = self._fit.epoch_loop.batch_progress.current.ready
            self._progress.trained_before = ready
        self._progress.access = self._progress.open_run()
        if self._fit.max_batches != float("inf"):
            self._length = int(self._fit.max_batches)
        loaders = self.combined_loader.flattened
        if len(loaders) == 1 and self._length is not None:
            self._loader = loaders[0]
        else:
            self._loader = CombinedBatches(self.combined_loader, self._length)

    def as_passed(self, batch: Batch) -> Batch:
        """The batch of the Healer as Lightning passes it, in the structure of the dataloaders.

        A module may return its only dataloader in a list or a dictionary. `training_step` then
        receives the batch in such a list or dictionary.

        Args:
            batch: a batch that the Healer has read.

        Returns:
            The batch, or a structure with the batch in it.
        """
        if isinstance(self._loader, CombinedBatches):
            return batch
        structure = self.combined_loader.iterables
        return apply_to_collection(structure, type(self._loader), lambda _: batch)

    def _length_of(self, epoch: int) -> int:
        """Number of batches of an epoch. The first may have begun in a Lightning checkpoint."""
        if epoch > 0:
            return self._length
        return max(self._length - self._progress.trained_before, 0)

    def reset(self) -> None:
        """Resets the counts, as Lightning's data fetcher does.

        Lightning calls this when it stops an epoch early. `__iter__` calls it for a new epoch.
        """
        self.fetched = 0
        self.done = False

    def teardown(self) -> None:
        """Shuts down the workers of the dataloaders.

        Lightning calls this at the end of a fit, also after an exception, and before it makes its
        dataloaders again.
        """
        if self._progress.access:
            for loader in self._progress.access.loaders:
                loader.close()
                loader.in_loop = False
        self.combined_loader.reset()


class CombinedBatches(Reader):
    """Lightning's train dataloaders as one loader.

    If the length is unknown, reads one batch ahead, because Lightning has to know which batch is
    the last.

    Args:
        combined: Lightning's loader of all train dataloaders.
        length: number of batches of an epoch, or None if unknown.

    Attributes:
        exhausted: whether the last batch is known to be the last of its epoch, without a length.
    """

    def __init__(self, combined: CombinedLoader, length: int | None) -> None:
        self._combined = combined
        self._length = length
        why = "the fit has several train dataloaders, and only one can be rewound"
        if length is None:
            why = "the train dataloader has no length, so one batch is always read ahead"
        super().__init__(self, obstacle=RewindObstacle(why))
        self.exhausted = False

    def __iter__(self) -> Iterator[Any]:
        """Yields batches, and an `UnreadableBatch` where reading raises."""
        self.exhausted = False
        batches = self._read()
        if self._length is not None:
            yield from batches
            return
        for batch, following in pairwise(chain(batches, [_END])):
            self.exhausted = following is _END
            yield batch

    def _read(self) -> Iterator[Batch | UnreadableBatch]:
        """Yields the batches without Lightning's indices."""
        for fetched in catch_unreadable(iter(self._combined)):
            if isinstance(fetched, UnreadableBatch):
                yield fetched
            else:
                yield fetched[0]


def replaced_fetcher(trainer: LightningTrainer, progress: Progress) -> AbstractContextManager[None]:
    """Makes the fit read through a `Feed`, also after Lightning has reloaded its dataloaders.

    LearningRateFinder and BatchSizeFinder train without the Healer. Within the fit AttachError is
    raised if `training_step` reads the data itself.

    Args:
        trainer: the Trainer. Other Trainers of the process keep their fetchers.
        progress: the counters of the fit.

    Returns:
        A context manager, at whose end Lightning chooses its fetchers again.
    """

    def choose(owner: Any, fetcher: Fetcher) -> Fetcher:
        if owner is not trainer or internals.is_searching(trainer):
            return fetcher
        if internals.reads_data_itself(fetcher):
            raise AttachError(
                "training_step takes dataloader_iter and reads the data itself, so a rollback "
                "cannot rewind the data: write training_step(self, batch, batch_idx), or heal the "
                "optimizer with healcore.torch.attach"
            )
        return Feed(trainer, progress)

    return internals.replaced_fetcher_choice(trainer, choose)
