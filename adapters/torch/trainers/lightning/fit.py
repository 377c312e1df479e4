"""The loop of a fit: `Feed` passes the Healer's batches to it, `Progress` has its counters."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from itertools import chain, pairwise
from typing import Any, TypeAlias

from lightning_utilities.core.apply_func import apply_to_collection
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader

from healcore.runtime.data import EmptyLoader
from healcore.runtime.data.readers import (
    Reader,
    UnreadableBatch,
    catch_unreadable,
)
from healcore.runtime.data.torch_reader import EPOCH_BEGUN
from healcore.runtime.driver import json_setting
from healcore.runtime.trainer_access import TrainerAccess
from healcore.torch.trainers.hook import patched

LightningTrainer: TypeAlias = Any
"""A Lightning `Trainer`, from `lightning` or from `pytorch_lightning`."""
Batch: TypeAlias = Any
"""A batch as a dataloader yields it."""

_END = object()


class Progress:
    """The counters of `trainer.fit_loop`, as a part of the Healer's state.

    `global_step`, the number of optimizer steps, is restored with the weights. Epoch and batch are
    the position in the data, so they are restored only if the data are rewound.

    The Healer saves and restores the counters when Lightning requests the next batch. After an
    exception within a step, it saves the counters before the first batch of that step.

    Args:
        trainer: the Trainer, in `setup` of the fit.
        open_run: returns the run at the first batch.

    Attributes:
        access: the run, or None before its first batch.
        schedulers: Lightning's configurations of the schedulers with which the fit begins.
        trained_before: number of batches of the first epoch that precede the Lightning checkpoint
            with which the run has begun.
        before: the counts before the first batch of a step.
        saved_limits: the limits of the fit in the store, or None before they are loaded.
    """

    def __init__(self, trainer: LightningTrainer, open_run: Callable[[], TrainerAccess]) -> None:
        self.open_run = open_run
        self.access: TrainerAccess | None = None
        self.schedulers: list[Any] = []
        self.trained_before = 0
        self.before: dict[str, Any] = {}
        self.saved_limits: dict[str, int] | None = None
        self._trainer = trainer
        self._accumulated = trainer.accumulate_grad_batches  # as given: a callback may change it

    def limits(self) -> dict[str, int]:
        """Lightning's limits of a fit. A value of -1 means no limit.

        A completed run that is started again with the same limits trains nothing.

        Returns:
            "max_steps" -> optimizer steps, "max_epochs" -> epochs.
        """
        loop = self._trainer.fit_loop
        return {"max_steps": loop.max_steps, "max_epochs": loop.max_epochs}

    @property
    def run_settings(self) -> dict[str, Any]:
        """The options that determine the training result, and the module's `hparams`.

        A restart with other options says which differ, and does not return the old model.

        Returns:
            Name -> number, text, bool or list, without the values that JSON cannot hold.
        """
        trainer = self._trainer
        loaders = getattr(trainer.fit_loop._combined_loader, "flattened", ())
        sizes: Any = [getattr(loader, "batch_size", None) for loader in loaders]
        if len(sizes) == 1:
            (sizes,) = sizes
        settings = {**self.limits(), "batch_size": sizes, "precision": str(trainer.precision)}
        settings["accumulate_grad_batches"] = self._accumulated
        for name, value in getattr(trainer.lightning_module, "hparams", {}).items():
            settings[f"hparams.{name}"] = value
        encoded = {name: json_setting(value) for name, value in settings.items()}
        return {name: value for name, value in encoded.items() if value is not None}

    def _counters(self) -> dict[str, Any]:
        """Lightning's counters by name, without `_batches_that_stepped`."""
        fit = self._trainer.fit_loop
        return {
            "epoch": fit.epoch_progress,
            "batch": fit.epoch_loop.batch_progress,
            "scheduler": fit.epoch_loop.scheduler_progress,
            "automatic": fit.epoch_loop.automatic_optimization.optim_progress,
            "manual": fit.epoch_loop.manual_optimization.optim_step_progress,
        }

    def state_dict(self) -> dict[str, Any]:
        """All counters as numbers.

        At the end of an epoch, the counters of the next epoch's start: a restart begins there.

        Returns:
            Name of a counter -> its counts; the number of accumulated batches; the limits.
        """
        state = {name: counter.state_dict() for name, counter in self._counters().items()}
        if self.access is not None and self.access.pending:
            state["batch"] = dict(self.before)
        epoch, batch = state["epoch"], state["batch"]
        if batch["is_last_batch"] or epoch["current"]["processed"] >= epoch["current"]["ready"]:
            for counts in epoch.values():
                finished = max(counts["ready"], counts["processed"])
                counts["ready"] = counts["started"] = finished + 1
                counts["processed"] = counts["completed"] = finished
            batch["current"] = dict.fromkeys(batch["current"], 0)
            batch["is_last_batch"] = False
        return {
            **state,
            "batches_that_stepped": self._trainer.fit_loop.epoch_loop._batches_that_stepped,
            "trained_before": self.trained_before,
            "window": self._trainer.accumulate_grad_batches,
            "limits": self.limits(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the running loops.

        Keeps epoch and batch if the data cannot be rewound. The training then continues with the
        next batches.

        Args:
            state: a result of `state_dict`.
        """
        trainer = self._trainer
        self.saved_limits = dict(state["limits"])
        self.trained_before = state["trained_before"]
        now = trainer.fit_loop.epoch_progress.current.processed
        rewinds = self.access is None or self.access.loaders.can_rewind
        if rewinds and state["epoch"]["current"]["processed"] < now:
            trainer.accumulate_grad_batches = state["window"]
        for name, counter in self._counters().items():
            if rewinds or name not in ("epoch", "batch"):
                counter.load_state_dict(state[name])
        trainer.fit_loop.epoch_loop._batches_that_stepped = state["batches_that_stepped"]

    def state_of_fit(self) -> dict[str, Any]:
        """The `state` of the Healer: name -> part, when the Trainer has made its optimizers.

        The only optimizer is "optimizer", several are "optimizer0", "optimizer1", ...
        """
        trainer, module = self._trainer, self._trainer.lightning_module
        state: dict[str, Any] = {"model": module, "progress": self}
        for number, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer{number}"] = optimizer
        if len(trainer.optimizers) == 1:
            state["optimizer"] = state.pop("optimizer0")
        for number, config in enumerate(self.schedulers):
            state[f"scheduler{number}"] = config.scheduler
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            state["scaler"] = scaler
        for callback in trainer.callbacks:  # those that hold averages of the weights
            copies = {}
            for name, value in vars(callback).items():
                if isinstance(value, AveragedModel | type(module)) and value is not module:
                    copies[f"{callback.state_key}.{name}"] = value
            if copies:
                part = _Averaging(callback, trainer.lr_scheduler_configs, self.schedulers)
                state |= {callback.state_key: part, **copies}
        return state


class _Averaging:
    """A callback that averages weights, as a part of the state.

    StochasticWeightAveraging replaces the schedulers of the fit (`first`) when it begins, which a
    rollback may undo.

    Args:
        callback: the callback, with `state_dict` and `load_state_dict`.
        schedulers: Lightning's live list of the schedulers of the fit.
        first: the schedulers with which the fit has begun.
    """

    def __init__(self, callback: Any, schedulers: list[Any], first: list[Any]) -> None:
        self._callback = callback
        self._schedulers = schedulers
        self._first = first

    def state_dict(self) -> Any:
        """The callback's own state."""
        return self._callback.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restores the callback within the fit, and the schedulers that it has replaced since.

        The `load_state_dict` of StochasticWeightAveraging is for a new fit.

        Args:
            state: a result of the callback's `state_dict`.
        """
        callback = self._callback
        callback.load_state_dict(state)
        if "scheduler_state" not in state or not callback._initialized:
            return
        if state["scheduler_state"] is None:  # it had not begun
            callback._initialized = False
            callback._swa_scheduler = callback.n_averaged = None
            self._schedulers[:] = self._first
        else:
            callback.n_averaged.fill_(state["n_averaged"])
            callback._swa_scheduler.load_state_dict(state["scheduler_state"])


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
        self._length: int | None = None
        """Number of batches of an epoch, or None if unknown."""
        self._batches: Any = None
        self._begun = False
        self.reset()

    def setup(self, combined_loader: Any, *, begun: bool = False) -> None:
        """Receives Lightning's loader of all train dataloaders.

        Lightning calls this when a fit begins and when it has made its dataloaders again, and then
        asks the loader for its length. Without its iterator the loader would raise then. The new
        iterator does not begin, so that no dataloader starts its workers or draws random numbers.

        Args:
            combined_loader: Lightning's loader, which may have other dataloaders than before.
            begun: whether another fetcher has begun the epoch, as a search of a rate does.
        """
        loaders = combined_loader.flattened
        for loader in loaders if begun else ():
            if isinstance(loader, DataLoader):
                vars(loader)[EPOCH_BEGUN] = True
        self.combined_loader = combined_loader
        modes = sys.modules[type(combined_loader).__module__]._SUPPORTED_MODES
        iterator = modes[combined_loader._mode]["iterator"]
        combined_loader._iterator = iterator(loaders, combined_loader.limits)

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

        Opens the run before the first batch.

        Raises:
            StopIteration: the epoch has no further batch.
        """
        progress, counts = self._progress, self._fit.epoch_loop.batch_progress
        if self._loader is None:
            self._open()
        access = progress.access
        assert access is not None
        if self._batches is None:
            # One iterator for all epochs, because a rollback may return to an earlier epoch.
            limit = None if self._length is None else self._length_of
            self._batches = access.batches(self._loader, limit)
        try:
            batch = next(self._batches)
        except (StopIteration, EmptyLoader):
            self.done = True
            raise StopIteration from None
        if len(access.pending) == 1:
            progress.before = counts.state_dict()
        self.fetched += 1
        is_last = access.ends_epoch or getattr(self._loader, "exhausted", False)
        # If the rest of this epoch is unreadable, the batch is already of the next epoch. It ends
        # this epoch, because Lightning's last step and validation have to follow a batch.
        epoch, index = access.pending[-1]
        ready = counts.current.ready
        if epoch == 0:
            ready -= progress.trained_before
        self.done = is_last or index < ready
        if self.done and self._length is not None:
            # Lightning validates at the end of an epoch only if its count reaches the length.
            counts.increment_by(max(self._length - 1 - counts.current.ready, 0))
        return self.as_passed(batch), index, 0

    def _open(self) -> None:
        """Opens the run, and chooses the loader that the Healer reads.

        Called before the first batch, when Lightning has loaded its own checkpoint.
        """
        progress = self._progress
        if progress.saved_limits is None:  # the store has no run to continue
            progress.trained_before = self._fit.epoch_loop.batch_progress.current.ready
        progress.access = progress.open_run()
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
        assert self._length is not None
        if epoch > 0:
            return self._length
        return max(self._length - self._progress.trained_before, 0)

    def reset(self) -> None:
        """Resets the counts. Lightning calls this when it stops an epoch early."""
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

    def __init__(self, combined: Any, length: int | None) -> None:
        self._combined = combined
        self._length = length
        why = "the fit has several train dataloaders, and only one can be rewound"
        if length is None:
            why = "the train dataloader has no length, so one batch is always read ahead"
        super().__init__(self, obstacle=why)
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

    LearningRateFinder and BatchSizeFinder, which train in `on_fit_start`, restore the weights at
    their end by themselves, and train without the Healer.

    Args:
        trainer: the Trainer. Other Trainers of the process keep their fetchers.
        progress: the counters of the fit.

    Returns:
        A context manager, at whose end Lightning chooses its fetchers again.
    """
    module = sys.modules[trainer.fit_loop.setup_data.__module__]
    select = module._select_data_fetcher

    def selected(owner: Any, *args: Any) -> Any:
        if owner is trainer and trainer.lightning_module._current_fx_name != "on_fit_start":
            return Feed(trainer, progress)
        return select(owner, *args)

    return patched(module, "_select_data_fetcher", selected)
