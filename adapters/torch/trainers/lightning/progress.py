"""Saves and restores Lightning's counters of a fit together with the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healcore.runtime.driver import json_setting


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

    def count_skipped(self, length: int) -> None:
        """Adds an epoch's skipped batches to Lightning's count, before its last batch.

        Lightning validates at the end of an epoch only if the count reaches `length`.
        """
        batch = self._fit.epoch_loop.batch_progress
        batch.increment_by(max(length - 1 - batch.current.ready, 0))

    def begin_step(self) -> None:
        """Records the counts before the first batch of a step."""
        batch = self._fit.epoch_loop.batch_progress
        self._before = {
            "current": batch.current.ready,
            "total": batch.total.ready,
            "is_last_batch": batch.is_last_batch,
        }

    def state_dict(self) -> dict[str, Any]:
        """Returns all counters as numbers."""
        loop = self._fit.epoch_loop
        epoch, batch = self._fit.epoch_progress.state_dict(), loop.batch_progress.state_dict()
        if self.within_step():
            before = self._before
            counts = {n: dict.fromkeys(batch[n], before[n]) for n in ("current", "total")}
            batch = {**before, **counts}
        _to_next_epoch(epoch, batch)
        return {
            "epoch": epoch,
            "batch": batch,
            "scheduler": loop.scheduler_progress.state_dict(),
            "automatic": loop.automatic_optimization.optim_progress.state_dict(),
            "manual": loop.manual_optimization.optim_step_progress.state_dict(),
            "batches_that_stepped": loop._batches_that_stepped,
            "limits": self._limits(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the running loops."""
        loop = self._fit.epoch_loop
        self._saved_limits = dict(state["limits"])
        if self.rewinds_data:
            self._fit.epoch_progress.load_state_dict(state["epoch"])
            loop.batch_progress.load_state_dict(state["batch"])
        loop.scheduler_progress.load_state_dict(state["scheduler"])
        loop.automatic_optimization.optim_progress.load_state_dict(state["automatic"])
        loop.manual_optimization.optim_step_progress.load_state_dict(state["manual"])
        loop._batches_that_stepped = state["batches_that_stepped"]


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
