"""`TorchStream`: a DataLoader of torch that cannot be rewound, but can be asked again."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from healcore.runtime.data.loader_adapter import BatchIterator, LoaderAdapter
from healcore.runtime.data.loader_parts import connects_again
from healcore.runtime.data.loader_protocols import AnyBatch


class _ReplayedSamples(Iterator[Any]):
    """The samples of a dataset, which can yield the samples of the current batch again.

    If a sample of a batch raises, torch drops the samples of this batch that it has read already. A
    stream that connects again continues after these samples, so they would never be trained on.
    """

    def __init__(self, samples: Iterator[Any]) -> None:
        self.samples = samples
        self.failure: Exception | None = None
        """The exception of the last sample, or None if it could be read."""
        self._of_batch: list[Any] = []
        """The samples of the current batch."""
        self._again: list[Any] = []
        """Samples to yield again, the last one first."""

    def __next__(self) -> Any:
        if self._again:
            sample = self._again.pop()
        else:
            sample = self._read()
        self._of_batch.append(sample)
        return sample

    def _read(self) -> Any:
        """Reads a new sample. If the stream has ended with a failure, raises it again."""
        failure, self.failure = self.failure, None
        try:
            return next(self.samples)
        except StopIteration:
            if failure is None:
                raise
            self.failure = failure  # the failure has ended the stream, and its data has not
            raise failure from None
        except Exception as error:
            self.failure = error
            raise

    def end_batch(self) -> None:
        """Forgets the samples of a batch that was read."""
        self._of_batch.clear()

    def begin_batch_again(self) -> None:
        """Yields the samples of a batch that was not read once more."""
        self._again = [*self._again, *reversed(self._of_batch)]
        self._of_batch.clear()


class TorchStream(LoaderAdapter, Iterator[AnyBatch]):
    """A torch DataLoader that cannot be rewound, such as one of an IterableDataset.

    Without workers, a dataset that connects again after an exception loses no sample.
    """

    _batches: BatchIterator
    _samples: _ReplayedSamples | None = None
    """The samples of this process, or None if workers read them or the stream cannot connect."""

    def start(self, epoch: int) -> BatchIterator:
        """Begins an epoch. Without workers, its samples are kept until their batch is read."""
        self._batches, self._samples = super().start(epoch), None
        fetcher = getattr(self._batches, "_dataset_fetcher", None)  # in a worker, if there are any
        samples = getattr(fetcher, "dataset_iter", None)
        if fetcher is not None and samples is not None and connects_again(samples):
            self._samples = fetcher.dataset_iter = _ReplayedSamples(samples)
        return self

    def __next__(self) -> AnyBatch:
        batch = next(self._batches)
        if self._samples is not None:
            self._samples.end_batch()
        return batch

    def retry_in_place(self, batches: BatchIterator) -> bool:
        """Prepares to yield the samples of the failed batch again. False if they are unknown."""
        if self._samples is None:
            return False
        self._samples.begin_batch_again()
        return True
