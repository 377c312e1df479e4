"""`Progress`: the counters of Lightning's loops, as a part of the Healer's state."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from healcore.runtime.driver import json_setting
from healcore.runtime.trainer_access import TrainerAccess
from healcore.torch.trainers.lightning import trainer_internals as internals
from healcore.torch.trainers.lightning.trainer_internals import LightningTrainer


class Progress:
    """The counters of `trainer.fit_loop`, as a part of the Healer's state.

    `global_step`, the number of optimizer steps, is restored with the weights. Epoch and batch are
    the position in the data, so they are restored only if the data are rewound.

    The Healer saves and restores the counters when Lightning requests the next batch. After an
    exception within a step, it saves the counters before the first batch of that step.

    Args:
        trainer: the Trainer, in `setup` of the fit.

    Attributes:
        open_run: returns the run at the first batch. The callback sets this function.
        access: the run, or None before its first batch.
        trained_before: number of batches of the first epoch that precede the Lightning checkpoint
            with which the run has begun.
        before: the counts before the first batch of a step.
        saved_limits: the limits of the fit in the store, or None before they are loaded.
    """

    def __init__(self, trainer: LightningTrainer) -> None:
        self._fit = trainer.fit_loop
        self.open_run: Callable[[], TrainerAccess]
        self.access: TrainerAccess | None = None
        self._accumulated = trainer.accumulate_grad_batches  # as given: a callback may change it
        self.trained_before = 0
        self.before: dict[str, Any] = {}
        self.saved_limits: dict[str, int] | None = None

    def limits(self) -> dict[str, int]:
        """Lightning's limits of a fit. A value of -1 means no limit.

        A completed run that is started again with the same limits trains nothing.

        Returns:
            "max_steps" -> optimizer steps, "max_epochs" -> epochs.
        """
        return {"max_steps": self._fit.max_steps, "max_epochs": self._fit.max_epochs}

    @property
    def run_settings(self) -> dict[str, Any]:
        """The options that determine the training result, and the module's `hparams`.

        A restart with other options says which differ, and does not return the old model.

        Returns:
            Name -> number, text, bool or list, without the values that JSON cannot hold.
        """
        trainer = self._fit.trainer
        settings: dict[str, Any] = {}
        for name, value in getattr(trainer.lightning_module, "hparams", {}).items():
            settings[f"hparams.{name}"] = value
        settings.update(self.limits())
        settings["batch_size"] = self._batch_size()
        settings["accumulate_grad_batches"] = self._accumulated
        settings["precision"] = str(trainer.precision)
        encoded = {}
        for name, value in settings.items():
            setting = json_setting(value)
            if setting is not None:
                encoded[name] = setting
        return encoded

    def _batch_size(self) -> Any:
        """The batch size of the only dataloader, or a list for several dataloaders."""
        loaders = getattr(internals.combined_loader_of(self._fit), "flattened", ())
        sizes = [getattr(loader, "batch_size", None) for loader in loaders]
        if len(sizes) == 1:
            return sizes[0]
        return sizes

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
        """All counters as numbers.

        At the end of an epoch, the counters of the next epoch's start: a restart begins there.

        Returns:
            Name of a counter -> its counts; the number of accumulated batches; the limits.
        """
        state = {name: counter.state_dict() for name, counter in self._counters().items()}
        if self.access is not None and self.access.pending:
            state["batch"] = dict(self.before)
        _to_next_epoch(state["epoch"], state["batch"])
        stepped = internals.logged_step(self._fit)
        settings = {"window": self._fit.trainer.accumulate_grad_batches, "limits": self.limits()}
        counts = {"batches_that_stepped": stepped, "trained_before": self.trained_before}
        return {**state, **counts, **settings}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Sets the counters of the running loops.

        Keeps epoch and batch if the data cannot be rewound. The training then continues with the
        next batches.

        Args:
            state: a result of `state_dict`.
        """
        self.saved_limits = dict(state["limits"])
        self.trained_before = state.get("trained_before", 0)
        now, saved = self._fit.epoch_progress.current, state["epoch"]["current"]
        rewinds = self.access is None or self.access.loaders.can_rewind
        if rewinds and saved["processed"] < now.processed:
            self._fit.trainer.accumulate_grad_batches = state["window"]
        for name, counter in self._counters().items():
            if rewinds or name not in ("epoch", "batch"):
                counter.load_state_dict(state[name])
        internals.set_logged_step(self._fit, state["batches_that_stepped"])


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
