"""`state_of_fit`: what the Healer of a fit saves and restores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim.swa_utils import AveragedModel

from healcore.torch.trainers.lightning import trainer_internals as internals
from healcore.torch.trainers.lightning.progress import Progress
from healcore.torch.trainers.lightning.trainer_internals import LightningTrainer


def state_of_fit(
    trainer: LightningTrainer, progress: Progress, schedulers: list[Any]
) -> dict[str, Any]:
    """The `state` of the Healer of a fit. Checkpoints and events use the same names of optimizers.

    Args:
        trainer: the Trainer, after it has made its optimizers.
        progress: the counters of the fit.
        schedulers: Lightning's configurations of the schedulers with which the fit has begun.

    Returns:
        Name -> part. The only optimizer is "optimizer", several are "optimizer0", "optimizer1", ...
    """
    state: dict[str, Any] = {"model": trainer.lightning_module}
    if len(trainer.optimizers) == 1:
        state["optimizer"] = trainer.optimizers[0]
    else:
        for number, optimizer in enumerate(trainer.optimizers):
            state[f"optimizer{number}"] = optimizer
    for number, config in enumerate(schedulers):
        state[f"scheduler{number}"] = config.scheduler
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None:
        state["scaler"] = scaler
    state["progress"] = progress
    state.update(_averages(trainer, schedulers))
    return state


def _averages(trainer: LightningTrainer, schedulers: list[Any]) -> dict[str, Any]:
    """The callbacks that hold copies of the module, such as weight averages, and the copies."""
    module = trainer.lightning_module
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        copies = {}
        for name, value in vars(callback).items():
            if isinstance(value, AveragedModel | type(module)):
                copies[f"{callback.state_key}.{name}"] = value
        if copies and module not in copies.values():
            part = _Averaging(callback, trainer.lr_scheduler_configs, schedulers)
            found[callback.state_key] = part
            found.update(copies)
    return found


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

        Args:
            state: a result of the callback's `state_dict`.
        """
        self._callback.load_state_dict(state)
        if internals.restore_averaging_schedule(self._callback, state):
            self._schedulers[:] = self._first
