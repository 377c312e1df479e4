"""Defines `LightningHealingCallback`: in `callbacks=[...]` it heals `trainer.fit`."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Unpack

from torch import Tensor
from torch.optim import Optimizer

from healcore.console import Console
from healcore.extras import require
from healcore.policy import Overrides, PolicyLike
from healcore.policy.loader import resolve
from healcore.runtime.healer import Healer
from healcore.runtime.incidents.hooks import EventHook, Hook
from healcore.runtime.incidents.run_metrics import ChangedMetrics
from healcore.runtime.store import CheckpointStore, Keep
from healcore.runtime.store.ranks import Ranks
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.trainers.lightning.clipping import with_limit_of
from healcore.torch.trainers.lightning.in_step import InStep
from healcore.torch.trainers.lightning.losses import Losses
from healcore.torch.trainers.lightning.whole_run import WholeRun

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
    """Arguments of `healcore.Healer`, by their names there, and values to replace in the policy."""

    events: str | os.PathLike[str] | None
    metrics: str | os.PathLike[str] | None
    save_every: int | None
    restart_every: int | None
    lag: int
    keep: Keep | None
    on_incident: Hook | Iterable[Hook]
    on_saved: EventHook | Iterable[EventHook]
    on_rollback: EventHook | Iterable[EventHook]
    rerun: bool
    resume: bool | Literal["auto"]
    nonfinite_ok: Iterable[str]
    ranks: Ranks | None
    attach: Mapping[str, object] | None
    trust: bool
    trackers: object
    stop_file: str | os.PathLike[str] | None
    console: Console


class LightningHealingCallback(Callback):
    """Heals `trainer.fit`: clips and skips in the step, rolls back in place, or stops the run.

        trainer = Trainer(max_epochs=3, callbacks=[LightningHealingCallback(store="healing")])
        trainer.fit(module, loader)

    Its counts (`heal/skips`, `heal/clips`, `heal/lr_scale`, ...) go to the Trainer's loggers when
    they change.
    Nothing else changes: automatic and manual optimization, several optimizers, accumulation,
    validation and other callbacks work as before. After a kill the same program goes on from
    the store. Works with `lightning` and with `pytorch_lightning`.

    `Trainer(gradient_clip_val=...)` is taken over during the fit as the policy's `clip.max_norm`,
    because Lightning clips before a policy could see the norm. Under "default" it then clips alone,
    as without healcore.

    Args:
        policy: a preset's name, the path of a TOML file, or a `healcore.policy.Policy`.
        store: a directory for checkpoints, a store, or None: host memory, which is lost with the
            process. `ModelCheckpoint` goes on as before.
        in_step_only: only clips and skips, without checkpoints, rollbacks and stops. The policy's
            state is then in Lightning's own checkpoints. Always so under `fast_dev_run`.
        loss_fn: the loss of one batch on the module's device, `lambda batch: module.loss(batch)`,
            by which the current weights are compared with earlier ones; see `healcore.Healer`.
        eval_loss: name of the metric that validation logs and the policy reads as `eval_loss`.
        **options: further arguments of `healcore.Healer` (`events`, `save_every`, `resume`, ...)
            and values to replace in the policy. With `in_step_only` only `attach`, `console`
            and the latter.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
        ValueError, TypeError: an option is out of range, or there is none of that name.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        store: str | os.PathLike[str] | CheckpointStore | None = None,
        in_step_only: bool = False,
        loss_fn: Callable[[Any], Any] | None = None,
        eval_loss: str | None = None,
        **options: Unpack[FitOptions],
    ) -> None:
        self._policy = policy
        self._in_step_only = in_step_only
        self._loss_fn = loss_fn
        self._eval_loss = eval_loss
        self._options: dict[str, Any] = dict(options)
        if in_step_only:
            if store is not None or loss_fn is not None:
                raise ValueError(
                    "in_step_only=True has no checkpoints: leave store and loss_fn out"
                )
            if unknown := options.keys() - _OVERRIDES - {"attach", "console"}:
                raise TypeError(
                    f"in_step_only=True has no Healer to give {', '.join(sorted(unknown))} to: "
                    "leave it out; values of the policy, attach={...} and console are taken"
                )
            resolve(policy, _overrides(self._options))
        else:
            self._options = {"store": store, **options}
            # Checks them now; that of the fit is made when the optimizers are there.
            Healer(policy, state={}, loss_fn=loss_fn, **self._options)
        self._run: InStep | WholeRun | None = None
        self._last_run: InStep | WholeRun | None = None
        self._losses: Losses | None = None
        self._restore_clip_value: Callable[[], None] | None = None
        self._fit_options: dict[str, Any] = {}
        self._engines: Mapping[str, Any] = {}

    @property
    def healings(self) -> Mapping[str, Healing]:
        """The handle of each optimizer of the last fit: "optimizer", or "optimizer0", ..."""
        return {} if self._last_run is None else self._last_run.healings

    @property
    def healer(self) -> Healer[Any] | None:
        """The Healer of the last fit, with `step`, `good`, `rollbacks`; None with `in_step_only`.

        Also None before the first batch.
        """
        return self._last_run.healer if isinstance(self._last_run, WholeRun) else None

    # -- hooks of Lightning ---------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Checks what can be known before the fit, and takes its gradient clipping over."""
        if stage != "fit":
            return
        self._put_clipping_back()  # of a fit that has raised before it began
        strategy = type(trainer.strategy)
        if not any(each.__name__ in _STRATEGIES for each in strategy.__mro__):
            raise AttachError(
                f"Trainer(strategy={strategy.__name__}) shards or replaces the optimizer in a way "
                f"that healcore does not know: use one of {', '.join(_STRATEGIES)}"
            )
        overrides = _overrides(self._options)
        limited = with_limit_of(trainer, self._policy, overrides)
        self._fit_options = {**self._options, **limited}
        if limited is not overrides:
            limit = trainer.gradient_clip_val
            self._restore_clip_value = partial(setattr, trainer, "gradient_clip_val", limit)
            trainer.gradient_clip_val = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attaches, or puts the Healer between Lightning and its dataloaders."""
        if self._in_step_only or trainer.fast_dev_run:  # type: ignore[attr-defined]
            attach = self._fit_options.get("attach") or {}
            console = self._fit_options.get("console", "auto")
            options = {"console": console, **attach, **_overrides(self._fit_options)}
            self._run = InStep(trainer, self._policy, options, self._engines)
        else:
            self._run = WholeRun(
                trainer, pl_module, self._policy, self._fit_options, self._loss_fn, self._engines
            )
            self._run.feed()
        self._last_run = self._run
        self._metrics = ChangedMetrics(self._run.metrics)
        self._losses = Losses(trainer, self._run.observe)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Feeds dataloaders that were reloaded (`reload_dataloaders_every_n_epochs`)."""
        if isinstance(self._run, WholeRun):
            self._run.feed()

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Logs what has changed of `heal/skips` and so on, every `log_every_n_steps`."""
        if self._run is None or not trainer._logger_connector.should_update_logs:
            return
        metrics = self._metrics() if trainer.loggers else {}
        if metrics:
            for logger in trainer.loggers:
                # As LearningRateMonitor does it; `self.log` would copy each number to the device.
                logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Observes the loss of one (micro-)batch."""
        if self._losses is not None:
            self._losses.before_backward(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Gives the losses to the optimizer that steps."""
        if self._losses is not None:
            self._losses.before_step(optimizer)

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observes the loss of the evaluation."""
        if self._run is not None and not trainer.sanity_checking and self._eval_loss is not None:
            value = trainer.callback_metrics.get(self._eval_loss)
            if value is not None:
                self._run.observe_eval(value)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Saves the last state."""
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the run in the Healer's way: a postmortem, and a journal for the next start."""
        self._close(exception)
        self._put_clipping_back()  # Lightning calls no teardown then

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Puts the Trainer's options back."""
        self._close(None)
        self._put_clipping_back()

    def state_dict(self) -> dict[str, Any]:
        """The engines, for Lightning's checkpoints. A sync on an accelerator."""
        engines = {name: healing.state_dict() for name, healing in self.healings.items()}
        return {"engines": engines} if engines else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the engines of a Lightning checkpoint, for the fit that begins."""
        self._engines = state_dict.get("engines", {})

    def on_init_end(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: this is an event of transformers, and the callback is Lightning's."""
        raise TypeError(
            "LightningHealingCallback is for a Lightning Trainer, and transformers has called it: "
            "write callbacks=[healcore.torch.HealingCallback(policy)]"
        )

    on_train_begin = on_init_end  # of a callback that was added later

    # -- within ---------------------------------------------------------------------------------

    def _put_clipping_back(self) -> None:
        if self._restore_clip_value is not None:
            self._restore_clip_value()
            self._restore_clip_value = None

    def _close(self, error: BaseException | None) -> None:
        run, self._run, self._losses = self._run, None, None
        if run is not None:
            self._engines = {}
            run.close(error)


def _overrides(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are values to replace in the policy."""
    return {name: value for name, value in options.items() if name in _OVERRIDES}
