"""Defines `LightningHealingCallback`, a callback that heals Lightning's `trainer.fit`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.core.engine import Engine
from healcore.extras import require
from healcore.policy import Overrides, Policy, PolicyLike, load
from healcore.policy.loader import resolve
from healcore.policy.trainer_limit import with_limit
from healcore.runtime.healer import Healer
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.run_metrics import ChangedMetrics
from healcore.runtime.run_options import Checkpoints, Logging
from healcore.runtime.store import CheckpointStore
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.trainers.lightning.runs import WholeRun

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback
else:
    require("lightning", "pytorch_lightning")
    from pytorch_lightning import Callback

_OVERRIDES = frozenset(Overrides.__annotations__)
_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class FitOptions(Overrides, total=False):
    """Arguments of `healcore.Healer`, and values to replace in the policy."""

    checkpoints: Checkpoints
    logging: Logging
    trackers: object
    hooks: Hooks
    resume: bool | Literal["auto"]
    attach: Mapping[str, object] | None
    stop_file: str | os.PathLike[str] | None


class LightningHealingCallback(Callback):
    """Heals `trainer.fit`: clips and skips steps, rolls back within the fit, or stops the run.

        trainer = Trainer(max_epochs=3, callbacks=[LightningHealingCallback(store="healing")])
        trainer.fit(module, loader)

    The Trainer's loggers receive the counts (`heal/skips`, `heal/clips`, `heal/lr_scale`, ...) when
    they change. Automatic and manual optimization, several optimizers, accumulation, validation and
    other callbacks work as usual. After a kill the same program continues from the store. Works
    with `lightning` and with `pytorch_lightning`.

    Lightning does not clip during the fit, because the policy needs the norm before clipping.
    Instead, `Trainer(gradient_clip_val=...)` becomes the policy's `clip.max_norm`. Under "default"
    this limit is then the only clipping, as without healcore.

    Args:
        policy: a preset's name, the path of a TOML file, or a `healcore.policy.Policy`.
        store: a directory for checkpoints, a store, or None for host memory, which is lost with the
            process. `ModelCheckpoint` works as usual.
        loss_fn: function that returns the loss of one batch on the module's device, to compare the
            current weights with earlier weights; see `healcore.Healer`.
        eval_loss: name of the metric that validation logs and the policy reads as `eval_loss`.
        **options: further arguments of `healcore.Healer` (`checkpoints`, `logging`, `resume`, ...)
            and values to replace in the policy.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        loss_fn: Callable[[Any], Any] | None = None,
        eval_loss: str | None = None,
        **options: Unpack[FitOptions],
    ) -> None:
        healer_options: dict[str, Any] = dict(options)
        overrides = {n: healer_options.pop(n) for n in _OVERRIDES & healer_options.keys()}
        self._policy = resolve(policy, overrides)
        self._eval_loss = eval_loss
        healer_options |= {"store": store, "loss_fn": loss_fn}
        Healer(self._policy, state={}, **healer_options)  # raises if an option is invalid
        self._options = healer_options
        self._run: WholeRun | None = None
        self._last_run: WholeRun | None = None
        self._pending_losses: list[Tensor] = []
        """Losses since the last step, if the fit has several optimizers."""
        self._clip_value: float | None = None
        """The Trainer's `gradient_clip_val` while the policy enforces it, or None."""
        self._fit_policy = self._policy
        self._engines: Mapping[str, Any] = {}

    @property
    def healings(self) -> Mapping[str, Healing]:
        """Handles of the optimizers of the last fit, by name ("optimizer", "optimizer0")."""
        return {} if self._last_run is None else self._last_run.healings

    @property
    def healer(self) -> Healer[Any] | None:
        """The Healer of the last fit, or None before the first batch."""
        return None if self._last_run is None else self._last_run.healer

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy, and makes the policy enforce the Trainer's `gradient_clip_val`."""
        if stage != "fit" or trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._restore_clip_value(trainer)  # an earlier fit may have raised before it began
        strategy = type(trainer.strategy)
        if not any(base.__name__ in _STRATEGIES for base in strategy.__mro__):
            raise AttachError(
                f"Trainer(strategy={strategy.__name__}) is not supported, because it may shard or "
                f"replace the optimizer: use one of {', '.join(_STRATEGIES)}"
            )
        self._fit_policy = self._policy
        limit = trainer.gradient_clip_val
        if limit and self._policy.mode != "observe":
            self._fit_policy = _with_limit_of(trainer, self._policy, float(limit))
            self._clip_value = limit
            trainer.gradient_clip_val = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Inserts the Healer between Lightning and its dataloaders. Not with `fast_dev_run`."""
        if trainer.fast_dev_run:  # type: ignore[attr-defined]
            return
        self._run = WholeRun(trainer, pl_module, self._fit_policy, self._options, self._engines)
        self._run.feed()
        self._last_run = self._run
        self._metrics = ChangedMetrics(self._run.metrics)
        self._pending_losses.clear()

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Wraps dataloaders that were reloaded (`reload_dataloaders_every_n_epochs`)."""
        if self._run is not None:
            self._run.feed()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Logs the counts that have changed (`heal/skips`, ...), every `log_every_n_steps`."""
        if self._run is None or not trainer._logger_connector.should_update_logs:
            return
        metrics = self._metrics() if trainer.loggers else {}
        if metrics:
            for logger in trainer.loggers:
                # Like LearningRateMonitor, because `self.log` would copy each number to the device.
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Observes the loss of one (micro-)batch as `training_step` returned it. No sync.

        With several optimizers (manual optimization), the loss belongs to the optimizer that steps
        next. A GAN's generator is therefore not judged by the discriminator's loss.
        """
        if self._run is None:
            return
        # Undoes two changes by Lightning: the GradScaler's scale, and the division by
        # accumulate_grad_batches (only in automatic optimization). The scale stays on the device.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = loss.detach() / scaler.scale(torch.ones((), device=loss.device))
        if trainer.accumulate_grad_batches != 1:
            loss = loss.detach() * trainer.accumulate_grad_batches
        if len(trainer.optimizers) > 1:
            self._pending_losses.append(loss.detach())
        else:
            for healing in self._run.healings.values():
                healing.observe(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Observes the losses since the last step for the optimizer that steps."""
        for healing in self.healings.values():
            if healing.optimizer is optimizer:
                for loss in self._pending_losses:
                    healing.observe(loss)
        self._pending_losses.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observes the loss of the evaluation."""
        if self._run is None or trainer.sanity_checking or self._eval_loss is None:
            return
        value = trainer.callback_metrics.get(self._eval_loss)
        if value is not None:
            for healing in self._run.healings.values():
                healing.observe_eval(value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the run, which saves the last state."""
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the run with the exception, which writes a postmortem."""
        self._close(exception)
        self._restore_clip_value(trainer)  # Lightning skips `teardown` after an exception

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the run, and restores the Trainer's `gradient_clip_val`."""
        self._close(None)
        self._restore_clip_value(trainer)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the engines for Lightning's checkpoints. One sync on a GPU."""
        engines = {name: healing.state_dict() for name, healing in self.healings.items()}
        return {"engines": engines} if engines else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the engine states of a Lightning checkpoint for the fit that begins."""
        self._engines = state_dict.get("engines", {})

    def _restore_clip_value(self, trainer: Trainer) -> None:
        if self._clip_value is not None:
            trainer.gradient_clip_val = self._clip_value
            self._clip_value = None

    def _close(self, error: BaseException | None) -> None:
        run, self._run = self._run, None
        if run is not None:
            self._engines = {}
            run.close(error)


def _with_limit_of(trainer: Trainer, policy: Policy | Engine, limit: float) -> Policy:
    """The policy, with the lower of the Trainer's limit and its own `clip.max_norm`.

    Raises AttachError for clipping by value, for `adagc`, which has no limit for the whole
    gradient, and for an Engine.
    """
    setting = f"Trainer(gradient_clip_val={limit:g}"
    if getattr(trainer.gradient_clip_algorithm, "value", "norm") != "norm":
        raise AttachError(
            f'{setting}, gradient_clip_algorithm="value") changes each element before the policy '
            'can measure the norm: use gradient_clip_algorithm="norm", or omit both arguments'
        )
    if isinstance(policy, Engine):
        raise AttachError(
            f"{setting}) clips before the policy can measure the norm, and the limit of an Engine "
            "is fixed: set the limit in the engine's config, and omit gradient_clip_val"
        )
    if policy.clip.kind == "adagc":
        raise AttachError(
            f"{setting}) clips before the policy can measure the norm, and [clip] kind = "
            '"adagc" has no limit for the whole gradient: omit gradient_clip_val, or use another '
            "kind"
        )
    if policy.clip.kind == "none":
        return load(policy, clip={"kind": "fixed", "max_norm": limit})
    return with_limit(policy, limit)  # type: ignore[return-value]
