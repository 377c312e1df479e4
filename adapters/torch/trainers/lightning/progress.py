"""Saves and restores Lightning's counters of a fit together with the weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healcore.runtime.driver import json_setting


class Progress:
    """The counters of `trainer.fit_loop` as an item of the Healer's state.

    `global_step`, the number of optimizer steps, is restored with the weights. Epoch and batch are
    the position in the data: they are restored only where the data are rewound.

    The Healer saves and restores them where Lightning asks for the next batch. At an exception
    within a step they are saved as they were before the first batch of that step.
    """

    def __init__(self, trainer: Any) -> None:
        self._fit = trainer.fit_loop
        self.data_goes_back = True
        """Whether the data are rewound to the checkpoint."""
        self.within_step: Callable[[], bool] = bool
        """Whether batches have been fetched since the last step."""
        self._before: dict[str, Any] = {}
        self._saved_limits: dict[str, int] | None = None

    def is_complete(self, *, had_completed: bool) -> bool:
        """Whether `max_steps` or `max_epochs` is reached, or the same fit had ended before.

        `had_completed`: the fit in the store ended by itself, by early stopping perhaps. With
        another limit it is trained further.
        """
        if had_completed and self._saved_limits == self._limits():
            return True
        fit = self._fit
        steps = fit.max_steps is not None and 0 <= fit.max_steps <= fit.epoch_loop.global_step
        epochs = fit.max_epochs is not None and fit.max_epochs >= 0
        return steps or (epochs and fit.epoch_progress.current.processed >= fit.max_epochs)

    def _limits(self) -> dict[str, int]:
        """Lightning's limits of a fit; -1 is no limit."""
        found = {"max_steps": self._fit.max_steps, "max_epochs": self._fit.max_epochs}
        return {name: -1 if limit is None else limit for name, limit in found.items()}

    @property
    def run_settings(self) -> dict[str, Any]:
        """The options that decide what is learnt: the Trainer's, and the module's `hparams`."""
        trainer = self._fit.trainer
        loaders = self._fit._combined_loader
        sizes = [getattr(each, "batch_size", None) for each in getattr(loaders, "flattened", ())]
        hparams = getattr(trainer.lightning_module, "hparams", {})
        found = {
            **{f"hparams.{name}": value for name, value in hparams.items()},
            **self._limits(),
            "batch_size": sizes[0] if len(sizes) == 1 else sizes,
            "accumulate_grad_batches": trainer.accumulate_grad_batches,
            "precision": str(trainer.precision),
        }
        plain = {name: json_setting(value) for name, value in found.items()}
        return {name: value for name, value in plain.items() if value is not None}

    def count_left_out(self, length: int) -> None:
        """Counts the skipped batches of an epoch before the last of its `length` batches.

        Lightning validates at the end of an epoch when the count of batches is complete.
        """
        batch = self._fit.epoch_loop.batch_progress
        batch.increment_by(max(length - 1 - batch.current.ready, 0))

    def begin_step(self) -> None:
        """Records the number of batches before the first one of a step."""
        batch = self._fit.epoch_loop.batch_progress
        self._before = {
            "current": batch.current.ready,
            "total": batch.total.ready,
            "is_last_batch": batch.is_last_batch,
        }

    def state_dict(self) -> dict[str, Any]:
        """All counters, as numbers."""
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
        """Puts them into the running loops."""
        loop = self._fit.epoch_loop
        self._saved_limits = dict(state["limits"])
        if self.data_goes_back:
            self._fit.epoch_progress.load_state_dict(state["epoch"])
            loop.batch_progress.load_state_dict(state["batch"])
        loop.scheduler_progress.load_state_dict(state["scheduler"])
        loop.automatic_optimization.optim_progress.load_state_dict(state["automatic"])
        loop.manual_optimization.optim_step_progress.load_state_dict(state["manual"])
        loop._batches_that_stepped = state["batches_that_stepped"]


def _to_next_epoch(epoch: dict[str, Any], batch: dict[str, Any]) -> None:
    """Moves counters that were taken after an epoch's last batch to the start of the next epoch."""
    current = epoch["current"]
    if not batch["is_last_batch"] and current["processed"] < current["ready"]:
        return
    for counts in epoch.values():
        finished = max(counts["ready"], counts["processed"])
        counts.update(ready=finished + 1, started=finished + 1, processed=finished)
        counts["completed"] = finished
    batch["current"] = dict.fromkeys(batch["current"], 0)
    batch["is_last_batch"] = False
