"""Passes the batches of a Healer to Lightning's training loop, and keeps the loop's counters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import Any

from lightning_utilities.core.apply_func import apply_to_collection
from torch.utils.data import DataLoader

from healcore.core.errors import AttachError
from healcore.runtime.data import EmptyLoader
from healcore.runtime.data.loader_adapters import UnreadableBatch, catch_unreadable
from healcore.runtime.data.torch_loader import BEGUN
from healcore.runtime.driver import json_setting
from healcore.runtime.run_hooks import RunHooks
from healcore.torch.trainers import patched

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

    def __init__(self, trainer: Any, progress: Progress) -> None:
        self._fit = trainer.fit_loop
        self._progress = progress
        self._loader: Any = None
        """The loader that the Healer reads, or None before the first batch."""
        self._length: Any = None
        """Number of batches of an epoch, or None if unknown."""
        self._batches: Any = None
        self._begun = False
        self.fetched, self.done = 0, False
        self._start_profiler: Callable[[], None]  # set by Lightning
        self._stop_profiler: Callable[[], None]

    def setup(self, combined_loader: Any, *, begun: bool = False) -> None:
        """Receives Lightning's loader of all train dataloaders.

        Lightning then asks for the loader's length, which requires its iterator. That iterator does
        not begin, because the Healer reads the dataloaders. `begun` is whether another fetcher has
        begun the epoch.
        """
        for loader in combined_loader.flattened:
            if begun and isinstance(loader, DataLoader):
                vars(loader)[BEGUN] = True
        self.combined_loader = combined_loader
        modes = sys.modules[type(combined_loader).__module__]._SUPPORTED_MODES
        iterator = modes[combined_loader._mode]["iterator"]
        combined_loader._iterator = iterator(combined_loader.flattened, combined_loader.limits)

    def __iter__(self) -> Feed:
        """Begins an epoch."""
        if self._loader is None and self._begun:
            iter(self.combined_loader)  # Lightning begins reloaded dataloaders twice, which draws
        self._begun = True
        if self.fetched and not self.done:
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
        batch_progress = self._fit.epoch_loop.batch_progress
        if self._loader is None:  # opened here, after Lightning has loaded its own checkpoint
            if self._progress.saved_limits is None:  # no run of the store
                self._progress.trained_before = batch_progress.current.ready
            self._progress.hooks = self._progress.open()
            if self._fit.max_batches != float("inf"):
                self._length = int(self._fit.max_batches)
            loaders = self.combined_loader.flattened
            rewinds = len(loaders) == 1 and self._length is not None
            combined = CombinedBatches(self.combined_loader, self._length)
            self._loader = loaders[0] if rewinds else combined
        hooks = self._progress.hooks
        if self._batches is None:
            # One iterator for all epochs, because a rollback may return to an earlier epoch.
            limit = None if self._length is None else self._length_of
            self._batches = hooks.batches(self._loader, limit)
        batch = next(self._batches)
        position = hooks.read_position
        if len(position.pending) == 1:
            self._progress.before = batch_progress.state_dict()
        self.fetched += 1
        is_last = position.ends_epoch or getattr(self._loader, "exhausted", False)
        # If the rest of this epoch is unreadable, the batch is already of the next epoch. It ends
        # this epoch, because Lightning's last step and validation have to follow a batch.
        epoch, index = position.pending[-1]
        before = 0 if epoch else self._progress.trained_before
        self.done = is_last or index < batch_progress.current.ready - before
        if self.done and self._length is not None:
            # Lightning validates at the end of an epoch only if its count reaches the length.
            batch_progress.increment_by(max(self._length - 1 - batch_progress.current.ready, 0))
        return self.as_passed(batch), index, 0

    def as_passed(self, batch: Any) -> Any:
        """The batch of the Healer as Lightning passes it, in the structure of the dataloaders."""
        if isinstance(self._loader, CombinedBatches):
            return batch
        structure = self.combined_loader.iterables
        return apply_to_collection(structure, type(self._loader), lambda _: batch)

    def _length_of(self, epoch: int) -> int:
        return self._length if epoch else max(self._length - self._progress.trained_before, 0)

    def reset(self) -> None:
        """Resets the counts, as Lightning's data fetcher does."""
        self.fetched, self.done = 0, False

    def teardown(self) -> None:
        """Shuts down the workers of the dataloaders."""
        for loader in self._progress.hooks.loaders if self._progress.hooks else ():
            loader.close()
        self.combined_loader.reset()


class CombinedBatches:
    """Lightning's train dataloaders as one loader.

    If the length is unknown, reads one batch ahead, because Lightning has to know which batch is
    the last.

    Attributes:
        why_not: why the loader cannot be rewound.
        exhausted: whether the last batch is known to be the last of its epoch, without a length.
    """

    def __init__(self, combined: Any, length: int | None) -> None:
        self._combined, self._length = combined, length
        self.why_not = "the fit has several train dataloaders, and only one can be rewound"
        if length is None:
            self.why_not = "the train dataloader has no length, so one batch is always read ahead"
        self.exhausted = False

    def __iter__(self) -> Iterator[Any]:
        """Yields batches, and an `UnreadableBatch` where reading raises."""
        fetched = catch_unreadable(iter(self._combined))
        self.exhausted = False
        batches = (each if isinstance(each, UnreadableBatch) else each[0] for each in fetched)
        if self._length is not None:
            yield from batches
            return
        for batch, following in pairwise(chain(batches, [_END])):
            self.exhausted = following is _END
            yield batch


def replaced_fetcher(trainer: Any, progress: Progress) -> AbstractContextManager[None]:
    """Makes the fit read through a `Feed`, also after Lightning has reloaded its dataloaders.

    LearningRateFinder and BatchSizeFinder train in `on_fit_start`, without the Healer.

    Raises AttachError within the fit if `training_step` reads the data itself.
    """
    module = sys.modules[trainer.fit_loop.setup_data.__module__]
    select = module._select_data_fetcher

    def selected(owner: Any, *args: Any) -> Any:
        fetcher = select(owner, *args)
        if owner is not trainer or trainer.lightning_module._current_fx_name == "on_fit_start":
            return fetcher
        if any(c.__name__ == "_DataLoaderIterDataFetcher" for c in type(fetcher).__mro__):
            raise AttachError(
                "training_step takes dataloader_iter and reads the data itself, so a rollback "
                "cannot rewind the data: write training_step(self, batch, batch_idx), or heal the "
                "optimizer with healcore.torch.attach"
            )
        return Feed(trainer, progress)

    return patched(module, "_select_data_fetcher", selected)


class Progress:
    """The counters of `trainer.fit_loop`, as a part of the Healer's state.

    `global_step`, the number of optimizer steps, is restored with the weights. Epoch and batch are
    the position in the data, so they are restored only if the data are rewound.

    The Healer saves and restores the counters when Lightning requests the next batch. After an
    exception within a step, it saves the counters before the first batch of that step.
    """

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self.open: Callable[[], RunHooks]  # returns the run at the first batch; set by the callback
        self.hooks: Any = None
        """The run, or None before its first batch."""
        self._window = trainer.accumulate_grad_batches  # as given: a callback may change it
        self.trained_before = 0
        """Number of batches of the first epoch that precede the Lightning checkpoint with which the
        run has begun."""
        self.before: dict[str, Any] = {}
        """The counts before the first batch of a step."""
        self.saved_limits: dict[str, int] | None = None
        """The limits of the fit in the store, or None before they are loaded."""

    def limits(self) -> dict[str, int]:
        """Lightning's limits of a fit. A value of -1 is no limit."""
        return {"max_steps": self._fit.max_steps, "max_epochs": self._fit.max_epochs}

    @property
    def run_settings(self) -> dict[str, Any]:
        """The options that determine the training result, and the module's `hparams`."""
        trainer = self._fit.trainer
        loaders = getattr(self._fit._combined_loader, "flattened", ())
        sizes = [getattr(loader, "batch_size", None) for loader in loaders]
        hparams = getattr(trainer.lightning_module, "hparams", {})
        settings = {
            **{f"hparams.{name}": value for name, value in hparams.items()},
            **self.limits(),
            "batch_size": sizes[0] if len(sizes) == 1 else sizes,
            "accumulate_grad_batches": self._window,
            "precision": str(trainer.precision),
        }
        encoded = {name: json_setting(value) for name, value in settings.items()}
        return {name: value for name, value in encoded.items() if value is not None}

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
        if self.hooks is not None and self.hooks.read_position.pending:
            state["batch"] = dict(self.before)
        _to_next_epoch(state["epoch"], state["batch"])
        stepped = self._fit.epoch_loop._batches_that_stepped
        settings = {"window": self._fit.trainer.accumulate_grad_batches, "limits": self.limits()}
        counts = {"batches_that_stepped": stepped, "trained_before": self.trained_before}
        return {**state, **counts, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the running loops."""
        self.saved_limits = dict(state["limits"])
        self.trained_before = state.get("trained_before", 0)
        now, saved = self._fit.epoch_progress.current, state["epoch"]["current"]
        rewinds = self.hooks is None or self.hooks.loaders.can_rewind
        if rewinds and saved["processed"] < now.processed:
            self._fit.trainer.accumulate_grad_batches = state["window"]
        for name, counter in self._counters().items():
            if rewinds or name not in ("epoch", "batch"):
                counter.load_state_dict(state[name])
        self._fit.epoch_loop._batches_that_stepped = state["batches_that_stepped"]


def _to_next_epoch(epoch: dict[str, Any], batch: dict[str, Any]) -> None:
    """Changes counters at the end of an epoch, in place, to the start of the next epoch."""
    current = epoch["current"]
    if not batch["is_last_batch"] and current["processed"] < current["ready"]:
        return
    for counts in epoch.values():
        finished = max(counts["ready"], counts["processed"])
        counts["ready"] = counts["started"] = finished + 1
        counts["processed"] = counts["completed"] = finished
    batch["current"] = dict.fromkeys(batch["current"], 0)
    batch["is_last_batch"] = False
