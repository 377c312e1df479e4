"""Clips and skips within `optimizer.step()` of Lightning's optimizers, and does nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore import console
from healcore.core.engine import StateError
from healcore.runtime.incidents.run_metrics import METRICS
from healcore.torch.attachment import attach
from healcore.torch.healing import Healing


class InStep:
    """The optimizers of a fit, each with its own engine.

    Attributes:
        healings: the handle of each optimizer, by the names of `named_optimizers`.
    """

    def __init__(
        self, trainer: Any, policy: Any, options: dict[str, Any], engines: Mapping[str, Any]
    ) -> None:
        self.healings: dict[str, Healing] = {}
        options = {"scaler": getattr(trainer.precision_plugin, "scaler", None), **options}
        try:
            for name, optimizer in named_optimizers(trainer).items():
                self.healings[name] = attach(optimizer, policy, **options)
        except BaseException:
            self.close()
            raise
        load_engines(self.healings, engines)

    def observe(self, loss: Tensor, optimizer: Optimizer | None) -> None:
        """Reports a loss to one optimizer, or to the only one."""
        for healing in self.healings.values():
            if optimizer is None or healing.optimizer is optimizer:
                healing.observe(loss)

    def observe_eval(self, loss: Any) -> None:
        """Reports an evaluation's loss."""
        for healing in self.healings.values():
            healing.observe_eval(loss)

    def metrics(self) -> dict[str, float]:
        """Numbers of the last step for a logger. A sync on an accelerator."""
        found: dict[str, float] = {}
        for name, healing in self.healings.items():
            prefix = "heal/" if len(self.healings) == 1 else f"heal/{name}/"
            values = healing.metrics()
            numbers = torch.stack([values[f"heal/{each}"].float() for each in METRICS]).tolist()
            found |= {
                f"{prefix}{each}": number for each, number in zip(METRICS, numbers, strict=True)
            }
        return found

    def close(self, error: BaseException | None = None) -> None:
        """Detaches."""
        for healing in self.healings.values():
            healing.detach()


def named_optimizers(trainer: Any) -> dict[str, Optimizer]:
    """Lightning's optimizers by the names that checkpoints and events have."""
    if len(trainer.optimizers) == 1:
        return {"optimizer": trainer.optimizers[0]}
    return {f"optimizer{i}": each for i, each in enumerate(trainer.optimizers)}


def load_engines(healings: Mapping[str, Healing], engines: Mapping[str, Any]) -> None:
    """Goes on with engine states of a Lightning checkpoint; without those of another policy."""
    for name, healing in healings.items():
        if name in engines:
            try:
                healing.load_state_dict(engines[name])
            except StateError as error:
                console.warning(f"the baselines of {name} start again: {error}")
