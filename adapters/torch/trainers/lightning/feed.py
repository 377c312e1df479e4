"""Passes the batches of a Healer to Lightning's training loop, and keeps the loop's counters."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain, islice
from typing import Any

from healcore.runtime.data import EmptyLoader
from healcore.runtime.data.loader_adapters import (
    TolerantIterator,
    why_no_state,
)
from healcore.runtime.data.torch_loader import TorchLoader, is_replayable, recorded
from healcore.runtime.driver import json_setting
from healcore.runtime.healer import Healer, loop_of

_END = object()


class Feed:
    """Replaces `trainer.fit_loop._data_fetcher`, with the attributes that Lightning's loops use.

    Lightning requests the next batch between two steps. The Healer then saves, rolls back or ends
    the run.

    Attributes:
        fetched: number of batches of this epoch so far.
        done: whether the last fetched batch is the last batch of its epoch.
        nothing_to_do: whether the run in the store is complete.
    """

    def __init__(
        self,
        trainer: Any,
        fetcher: Any,
        progress: Progress,
        open_healer: Callable[[Any, bool], Healer[Any]],
    ) -> None:
        self._trainer = trainer
        self._fetcher = fetcher
        self._progress = progress
        self._open = open_healer
        self._loop = trainer.fit_loop.epoch_loop
        self._loader: TrainLoader | None = None
        """The loader that the Healer reads, or None before the first batch."""
        self._done_before = 0
        """Number of batches of the first epoch that precede Lightning's checkpoint."""
        self._healer: Healer | None = None
        self._batches: Iterator[Any] | None = None
        self.fetched = 0
        self.done = self.nothing_to_do = False
        self._start_profiler: Callable[[], None]  # set by Lightning
        self._stop_profiler: Callable[[], None]

    @property
    def combined_loader(self) -> Any:
        """Lightning's loader of all train dataloaders."""
        return self._fetcher.combined_loader

    def __iter__(self) -> Feed:
        """Begins an epoch. Lightning calls this before every epoch except the first."""
        if self._loader is None:
            iter(self._fetcher)  # Lightning begins reloaded dataloaders twice
        elif self.fetched and not self.done:
            self._batches = None  # the epoch ended early: the Healer begins the next epoch
        self.reset()
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
        batch_progress = self._loop.batch_progress
        if self._loader is None:  # created here, after Lightning has loaded its own checkpoint
            self._done_before = batch_progress.current.ready
            limit = self._trainer.fit_loop.max_batches
            length = None if limit == float("inf") else int(limit)
            self._loader = TrainLoader(self._fetcher, length, self._done_before)
            self._healer = self._open(self._trainer, self._loader.why_not is None)
            had_completed = loop_of(self._healer).data.had_completed
            self.nothing_to_do = self._progress.is_complete(had_completed=had_completed)
        healer, loader = self._healer, self._loader
        if self.nothing_to_do or healer is None:
            raise StopIteration
        if self._batches is None:
            # One iterator for all epochs, because a rollback may return to an earlier epoch.
            self._batches = healer.batches(loader, epochs=None)
        fetched = next(self._batches)
        data = loop_of(healer).data
        if len(data.unused) == 1:
            self._progress.begin_step()
        self.fetched += 1
        known = data.loaders.find(loader)
        is_last = known is not None and known.is_last()
        # A batch of the next epoch follows if the rest of this epoch is unreadable. It ends the
        # epoch, because Lightning's last step and validation have to follow a batch.
        ready = batch_progress.current.ready - (0 if data.unused[-1].epoch else self._done_before)
        self.done = loader.exhausted or is_last or data.unused[-1].index < ready
        if self.done and loader.full_length is not None:
            # Lightning validates at the end of an epoch only if its count reaches the length.
            skipped = loader.full_length - 1 - batch_progress.current.ready
            batch_progress.increment_by(max(skipped, 0))
        return fetched

    def reset(self) -> None:
        """Resets the counts, as Lightning's data fetcher does."""
        self.fetched, self.done = 0, False

    def teardown(self) -> None:
        """Shuts down the workers of the dataloaders."""
        self._batches = None
        self._fetcher.teardown()


class TrainLoader:
    """Lightning's train dataloaders as one loader, within `limit_train_batches`.

    If the length is unknown, reads one batch ahead, because Lightning has to know which batch is
    the last.

    Args:
        fetcher: Lightning's data fetcher, which has begun the first epoch.
        length: number of batches per epoch, or None if unknown.
        done: number of batches of the first epoch that precede Lightning's checkpoint.

    Attributes:
        full_length: number of batches per epoch, or None if unknown.
        length: number of batches of the current epoch, or None if unknown.
        exhausted: whether the last batch is known to be the last of its epoch, without a length.
        why_not: reason why the loader cannot be rewound, or None.
    """

    def __init__(self, fetcher: Any, length: int | None, done: int) -> None:
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
        self.full_length = length
        self.length = None if length is None else max(length - done, 0)
        self.exhausted = False
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
        """Yields Lightning's (batch, index, dataloader index), or an `UnreadableBatch`."""
        batches, self.exhausted = TolerantIterator(self._begin()), False
        if self.length is not None:
            for batch in islice(batches, self.length - self._index):
                self._index += 1
                yield batch
            return
        ahead: Any = next(batches, _END)
        while ahead is not _END:
            batch, ahead = ahead, next(batches, _END)
            self._index += 1
            self.exhausted = ahead is _END
            yield batch

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
        self._index, self.length = 0, self.full_length
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


class Progress:
    """The counters of `trainer.fit_loop`, as a part of the Healer's state.

    `global_step`, the number of optimizer steps, is restored with the weights. Epoch and batch are
    the position in the data, so they are restored only if the data are rewound.

    The Healer saves and restores the counters when Lightning requests the next batch. After an
    exception within a step, it saves the counters before the first batch of that step.
    """

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self.rewinds_data = True
        """Whether a rollback rewinds the data to the checkpoint."""
        self.within_step: Callable[[], bool] = bool
        """Returns whether batches have been fetched since the last step."""
        self._before: dict[str, Any] = {}
        self._saved_limits: dict[str, int] | None = None

    def is_complete(self, *, had_completed: bool) -> bool:
        """Whether `max_steps` or `max_epochs` is reached, or an earlier fit has completed.

        `had_completed` is whether the fit in the store completed, for instance by early stopping.
        That fit counts only if its limits were the same as the current limits.
        """
        if had_completed and self._saved_limits == self._limits():
            return True
        fit = self._fit
        steps = fit.max_steps is not None and 0 <= fit.max_steps <= fit.epoch_loop.global_step
        epochs = fit.max_epochs is not None and fit.max_epochs >= 0
        return steps or (epochs and fit.epoch_progress.current.processed >= fit.max_epochs)

    def _limits(self) -> dict[str, int]:
        """Lightning's limits of a fit. A value of -1 is no limit."""
        limits = {"max_steps": self._fit.max_steps, "max_epochs": self._fit.max_epochs}
        return {name: -1 if limit is None else limit for name, limit in limits.items()}

    @property
    def run_settings(self) -> dict[str, Any]:
        """The options that determine the training result, and the module's `hparams`."""
        trainer = self._fit.trainer
        loaders = getattr(self._fit._combined_loader, "flattened", ())
        sizes = [getattr(loader, "batch_size", None) for loader in loaders]
        hparams = getattr(trainer.lightning_module, "hparams", {})
        settings = {
            **{f"hparams.{name}": value for name, value in hparams.items()},
            **self._limits(),
            "batch_size": sizes[0] if len(sizes) == 1 else sizes,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
        }
        encoded = {name: json_setting(value) for name, value in settings.items()}
        return {name: value for name, value in encoded.items() if value is not None}

    def begin_step(self) -> None:
        """Records the counts before the first batch of a step."""
        batch = self._fit.epoch_loop.batch_progress
        self._before = {
            "current": batch.current.ready,
            "total": batch.total.ready,
            "is_last_batch": batch.is_last_batch,
        }

    def _counters(self) -> dict[str, Any]:
        """Lightning's counters by name, without `_batches_that_stepped`."""
        loop = self._fit.epoch_loop
        return {
            "epoch": self._fit.epoch_progress,
            "batch": loop.batch_progress,
            "scheduler": loop.scheduler_progress,
            "automatic": loop.automatic_optimization.optim_progress,
            "manual": loop.manual_optimization.optim_step_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns all counters as numbers."""
        state = {name: counter.state_dict() for name, counter in self._counters().items()}
        if self.within_step():
            for name, count in self._before.items():
                counts = state["batch"][name]
                is_flag = not isinstance(counts, dict)
                state["batch"][name] = count if is_flag else dict.fromkeys(counts, count)
        _to_next_epoch(state["epoch"], state["batch"])
        stepped = self._fit.epoch_loop._batches_that_stepped
        return {**state, "batches_that_stepped": stepped, "limits": self._limits()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the running loops."""
        self._saved_limits = dict(state["limits"])
        for name, counter in self._counters().items():
            if self.rewinds_data or name not in ("epoch", "batch"):
                counter.load_state_dict(state[name])
        self._fit.epoch_loop._batches_that_stepped = state["batches_that_stepped"]


def _to_next_epoch(epoch: dict[str, Any], batch: dict[str, Any]) -> None:
    """Changes counters at the end of an epoch, in place, to the start of the next epoch."""
    current = epoch["current"]
    if not batch["is_last_batch"] and current["processed"] < current["ready"]:
        return
    for counts in epoch.values():
        finished = max(counts["ready"], counts["processed"])
        counts.update(ready=finished + 1, started=finished + 1, processed=finished)
        counts["completed"] = finished
    batch["current"] = dict.fromkeys(batch["current"], 0)
    batch["is_last_batch"] = False
