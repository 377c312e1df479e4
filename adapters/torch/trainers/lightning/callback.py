"""Defines `LightningHealingCallback`, a callback that heals Lightning's `trainer.fit`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.swa_utils import AveragedModel

from healcore.adapter_registry import require
from healcore.console import info
from healcore.core.errors import AttachError
from healcore.policy import PolicyLike
from healcore.policy.loader import can_apply_limit, with_limit
from healcore.runtime.healer import Healer, hooks_of
from healcore.runtime.run.metrics import ChangedMetrics
from healcore.runtime.run_hooks import RunHooks
from healcore.runtime.run_options import HostPolicy
from healcore.runtime.store.several import Places
from healcore.torch.attachment import Healing
from healcore.torch.measurement import StepNorms
from healcore.torch.step_listener import StepListener
from healcore.torch.trainers import (
    TrainerOptions,
    healings_of,
    load_engines,
    newest_step,
    patched,
    resolve_options,
)
from healcore.torch.trainers.lightning.feed import Feed, Progress, replaced_fetcher
from healcore.torch.trainers.lightning.step_loss import StepLoss

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    require("lightning", "pytorch_lightning")
    from pytorch_lightning import Callback, LightningModule, Trainer

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class LightningHealingCallback(Callback):
    """Heals `trainer.fit`: clips and skips steps, rolls back within the fit, or stops the run.

        trainer = Trainer(max_epochs=3, callbacks=[LightningHealingCallback(store="healing")])
        trainer.fit(module, loader)

    The Trainer's loggers receive the counts (`heal/skips`, `heal/clips`, `heal/lr_scale`, ...) when
    they change. Automatic and manual optimization, several optimizers, accumulation, validation and
    other callbacks work as usual. After a kill the same program continues from the store. Works
    with `lightning` and with `pytorch_lightning`.

    Lightning clips after the policy has measured the norm. A policy that clips adopts
    `Trainer(gradient_clip_val=...)` as its `clip.max_norm` instead, unless its limit is lower.

    Args:
        policy: a preset's name, the path of a TOML file, or a `healcore.policy.Policy`.
        store: a directory for checkpoints, a store, a list of these, or None for host memory, which
            is lost with the process. `ModelCheckpoint` works as usual. The store continues a run
            exactly, so `ckpt_path` is loaded only if the store has no checkpoint of a trained step.
        loss_fn: function that returns the loss of one batch on the module's device, to compare the
            current weights with earlier weights; see `healcore.Healer`. "auto" calls
            `training_step` without logging, and restores what the call changes. With manual
            optimization, or with attributes that cannot be restored, a line says so and no weights
            are compared. None compares no weights.
        eval_loss: name of the metric that validation logs and the policy reads as `eval_loss`.
        **options: further arguments of `healcore.Healer` (`checkpoints`, `logging`, `resume`, ...)
            and values to replace in the policy.

    Attributes:
        healer: the Healer of the last fit, or None before the first batch.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """

    def __init__(
        self,
        policy: PolicyLike = "default",
        *,
        store: Places = None,
        loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
        eval_loss: str | None = None,
        **options: Unpack[TrainerOptions],
    ) -> None:
        self._policy, self._options = resolve_options(
            policy, {**options, "store": store, "loss_fn": None if loss_fn == "auto" else loss_fn}
        )
        self._uses_training_step = loss_fn == "auto" and self._may_compare()
        self._eval_loss = eval_loss
        self.healer: Healer[Any] | None = None
        self._progress: Progress | None = None
        """The counters of the running fit, or None outside of a fit."""
        self._changes = ExitStack()
        """Restores the Trainer and its loops."""
        self._metrics = ChangedMetrics(dict)
        self._loaded_engines: Mapping[str, Any] = {}
        """Engine states of the Lightning checkpoint that the fit begins with."""

    def _may_compare(self) -> bool:
        return HostPolicy.of(self._policy, {}).rolls_back

    @property
    def healings(self) -> Mapping[str, Healing]:
        """Handles of the optimizers of the last fit, by name ("optimizer", "optimizer0")."""
        return healings_of(self.healer)

    # -- begin and end --------------------------------------------------------------------------

    def setup(self, trainer: Any, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy, and makes the fit read its batches through the Healer."""
        if stage != "fit" or trainer.fast_dev_run:
            return
        self._changes.close()  # an earlier fit may have raised before it began
        self.healer = None
        strategy = type(trainer.strategy)
        if not any(base.__name__ in _STRATEGIES for base in strategy.__mro__):
            raise AttachError(
                f"Trainer(strategy={strategy.__name__}) is not supported, because it may shard or "
                f"replace the optimizer: use one of {', '.join(_STRATEGIES)}"
            )
        self._progress = progress = Progress(trainer)
        progress.open = functools.partial(self._run_at_first_batch, trainer, progress)
        newest = trainer.strategy.broadcast(newest_step(self._options["store"]))
        self._store_has_run = newest is not None
        if newest is not None:
            self._choose_checkpoint(trainer._checkpoint_connector, newest)
        self._changes.enter_context(replaced_fetcher(trainer, progress))
        # Others may read counters in `on_train_start`, and change weights in `on_train_end`.
        callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self._changes.enter_context(patched(trainer, "callbacks", callbacks))

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        """Begins a run. Opens its Healer if the store has a checkpoint.

        The hooks of the first epoch then see the epoch of the checkpoint. They may change the
        initial state, so the Healer of a new run is opened with the first batch.
        """
        if (progress := self._progress) is None:
            return
        # LearningRateFinder and BatchSizeFinder set `ckpt_path` too, to a checkpoint of step 0.
        self._resumed_by_lightning = trainer.ckpt_path is not None and trainer.global_step > 0
        if self._resumed_by_lightning and self._options["store"] is not None:
            path = trainer.ckpt_path
            info(f"Lightning's {path} continues the run, because the store has no trained step")
        self._policy_of_fit, limit = self._policy, trainer.gradient_clip_val
        if limit and trainer.gradient_clip_algorithm != "value" and can_apply_limit(self._policy):
            self._policy_of_fit = with_limit(self._policy, float(limit))
            self._changes.enter_context(patched(trainer, "gradient_clip_val", None))
        self._read_last_steps_of_epochs(fit := trainer.fit_loop)
        self._schedulers = [*trainer.lr_scheduler_configs]
        if not isinstance(fit._data_fetcher, Feed):  # a search has made it
            fit._data_fetcher = Feed(trainer, progress)
            fit._data_fetcher.setup(fit._combined_loader, begun=True)
        if self._store_has_run:
            hooks = self._open(trainer, progress)
            fit._resuming_from_checkpoint = True  # or Lightning calls `iter` once more
            completed = hooks.had_completed and progress.saved_limits == progress.limits()
            trainer.should_stop |= completed  # also a fit that another callback has stopped
            if fit._should_reload_train_dl:
                epoch, every = trainer.current_epoch, trainer.reload_dataloaders_every_n_epochs
                count = fit.epoch_progress.current
                count.completed -= epoch % every  # `train_dataloader` may read `current_epoch`
                fit.setup_data()
                count.completed = epoch
                hooks.loaders.count_from(epoch // every)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the run, which saves the last state."""
        self._close(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the run with the exception, which writes a postmortem."""
        self._close(exception)  # Lightning skips `teardown` after an exception

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the run, and restores the Trainer's `gradient_clip_val`."""
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        self._changes.close()
        progress, self._progress = self._progress, None
        if progress is None or self.healer is None:
            return
        self._loaded_engines = {}
        if type(error).__name__ == "SIGTERMException":
            # Lightning raises this after a step, before the Healer has processed the step.
            try:
                self.healer.after_step()
            except BaseException as ended:  # Lightning's exception has status 0
                error.code, error = getattr(ended, "code", 1), ended  # type: ignore[union-attr]
        self.healer.__exit__(type(error) if error else None, error, None)

    def state_dict(self) -> dict[str, Any]:
        """Returns the states of the engines for Lightning's checkpoints. One sync on a GPU."""
        engines = {name: healing.state_dict() for name, healing in self.healings.items()}
        return {"engines": engines} if engines else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the engine states of a Lightning checkpoint for the fit that begins."""
        self._loaded_engines = state_dict.get("engines", {})

    # -- the steps ------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Logs the counts that have changed (`heal/skips`, ...), every `log_every_n_steps`."""
        if self._progress is None or not trainer._logger_connector.should_update_logs:
            return
        metrics = self._metrics() if trainer.loggers else {}
        for logger in trainer.loggers if metrics else ():
            # Like LearningRateMonitor, because `self.log` would copy each number to the device.
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:  # type: ignore[override]
        """Within an accumulation, defers the end by SIGTERM to the step, which can be saved."""
        if self._progress is None or self.healer is None or not trainer.received_sigterm:
            return
        if hooks_of(self.healer).driver.window.is_accumulating():
            trainer._signal_connector.received_sigterm = False

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Observes the loss of one (micro-)batch as `training_step` returned it. No sync.

        With several optimizers (manual optimization), the loss belongs to the optimizer that steps
        next. A GAN's generator is therefore not judged by the discriminator's loss.
        """
        if self._progress is None:
            return
        # Undoes two changes by Lightning: the GradScaler's scale, and the division by
        # accumulate_grad_batches (only in automatic optimization). The scale stays on the device.
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        if scaler is not None:
            loss = loss.detach() / scaler.scale(torch.ones((), device=loss.device))
        if trainer.accumulate_grad_batches != 1:
            loss = loss.detach() * trainer.accumulate_grad_batches
        for healing in self.healings.values():
            healing.observe(loss)

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer
    ) -> None:
        """Drops the losses since the last step for the optimizers that do not step."""
        for healing in self.healings.values():
            if healing.optimizer is not optimizer:
                healing.drop_losses()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observes the loss of the evaluation."""
        if self._progress is None or trainer.sanity_checking or self._eval_loss is None:
            return
        value = trainer.callback_metrics.get(self._eval_loss)
        if value is not None and self.healer is not None:
            self.healer.observe(eval_loss=value)

    def _run_at_first_batch(self, trainer: Any, progress: Progress) -> RunHooks:
        """Returns the open run when Lightning requests the first batch.

        Every checkpoint is taken at this point of the loop, so a rollback can restore the loop's
        counters. Hooks have run since an earlier `_open`, so the checkpoint is loaded again.
        """
        if self.healer is None:
            hooks = self._open(trainer, progress)
        else:
            hooks = hooks_of(self.healer)
        hooks.reload_before_first_batch()
        return hooks

    def _open(self, trainer: Any, progress: Progress) -> RunHooks:
        """Opens the Healer, which resumes the run in its store."""
        options = dict(self._options)
        if (loss_fn := options["loss_fn"]) is not None:
            to_device, fit = trainer.strategy.batch_to_device, trainer.fit_loop
            options["loss_fn"] = lambda batch: loss_fn(
                to_device(fit._data_fetcher.as_passed(batch))
            )
        elif self._uses_training_step:
            options["loss_fn"] = self._training_loss(trainer)
        state = _state(trainer, progress, self._schedulers)
        healer = Healer(self._policy_of_fit, state=state, **options)
        self.healer = healer.__enter__()
        self._metrics = ChangedMetrics(healer.metrics)
        if trainer.lightning_module.automatic_optimization:
            self._clip_after_measuring(trainer.precision_plugin)
        hooks = hooks_of(healer)
        if self._resumed_by_lightning:
            load_engines(healer, self._loaded_engines)
            hooks.ignore_first_weights()
        return hooks

    def _training_loss(self, trainer: Any) -> StepLoss | None:
        """The loss by `training_step`, or None with a line if the call cannot be undone."""
        fit = trainer.fit_loop
        loss = StepLoss(trainer, lambda batch: fit._data_fetcher.as_passed(batch))
        if why_not := loss.obstacle:
            info(
                f"no weights are compared, because training_step cannot be called again: {why_not};"
                " pass loss_fn=, a function that returns the loss of a batch"
            )
            return None
        return loss

    def _clip_after_measuring(self, plugin: Any) -> None:
        """Postpones Lightning's clipping of a step until the policy has measured the norm."""
        clip_now, postponed = plugin.clip_gradients, dict[Optimizer, Callable[[], None]]()
        steps = {each.optimizer: each.healed_step for each in self.healings.values()}

        def clip(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            call = functools.partial(clip_now, optimizer, *args, **kwargs)
            if optimizer not in steps or steps[optimizer].in_update:  # L-BFGS evaluates again
                call()
            else:
                postponed[optimizer] = call

        def clip_postponed(optimizer: Optimizer) -> None:
            call = postponed.pop(optimizer, None)
            if call is not None:
                call()

        for optimizer, step in steps.items():
            clip_step = functools.partial(clip_postponed, optimizer)
            step.set_listener(_ClipAfterJudging(step.listener, clip_step))
        self._changes.enter_context(patched(plugin, "clip_gradients", clip))

    def _choose_checkpoint(self, connector: Any, newest: int) -> None:
        """Makes Lightning restore its own checkpoint only if the store has no trained step.

        Programs pass Lightning's newest checkpoint, which may be some steps newer than the store's.
        The store has precedence, because it has the random states and the position in the data:
        the run repeats these steps and ends as if it had not been interrupted.

        Args:
            connector: the Trainer's connector.
            newest: step of the newest checkpoint in the store; 0 for the state before training.
        """
        restore = connector._restore_modules_and_callbacks  # not called by Lightning's searches

        def restore_one(checkpoint_path: Any = None, *args: Any, **options: Any) -> None:
            if checkpoint_path and not newest:
                self._store_has_run = False  # the Healer replaces the state before training
                restore(checkpoint_path, *args, **options)
                return
            if checkpoint_path:
                info(
                    f"the store continues the run exactly, from its step {newest}, and not "
                    f"Lightning's {checkpoint_path}: newer steps in it are repeated"
                )
            restore()

        self._changes.enter_context(patched(connector, restore.__name__, restore_one))

    def _read_last_steps_of_epochs(self, fit: Any) -> None:
        """Replaces a method of Lightning's loop, because no callback runs at its moment."""
        loop, loop_on_advance_end = fit.epoch_loop, fit.epoch_loop.on_advance_end

        def read_last_steps(data_fetcher: Any) -> None:
            """Reads the last steps of an epoch, which may roll the run back into the epoch.

            Lightning requests no batch after the last batch. Its callbacks run before the loop's
            counters are complete, or after the end of the loop.
            """
            loop_on_advance_end(data_fetcher)
            if self.healer is not None and loop.done:
                self.healer.after_step(last=True)
                # The hooks and schedulers of the epoch follow.
                hooks_of(self.healer).goes_on_after_step()

        self._changes.enter_context(patched(loop, "on_advance_end", read_last_steps))


class _ClipAfterJudging:
    """Passes each step on to the Healer's listener, and clips after the policy has measured.

    A `StepListener`.

    Args:
        listener: the listener of the Healer's driver.
        clip: makes Lightning's own clip of this step, if Lightning has asked for one.
    """

    def __init__(self, listener: StepListener, clip: Callable[[], None]) -> None:
        self._clip = clip
        self._listener = listener
        self.ended = listener.ended
        self.stepped = listener.stepped

    def judged(self, norms: StepNorms) -> None:
        """See `StepListener.judged`."""
        self._listener.judged(norms)
        self._clip()


def _state(trainer: Any, progress: Progress, schedulers: list[Any]) -> dict[str, Any]:
    """State of a fit. Checkpoints and events use the same names of optimizers."""
    optimizers = {f"optimizer{i}": each for i, each in enumerate(trainer.optimizers)}
    if len(optimizers) == 1:
        optimizers = {"optimizer": trainer.optimizers[0]}
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return {
        "model": trainer.lightning_module,
        **optimizers,
        **{f"scheduler{i}": config.scheduler for i, config in enumerate(schedulers)},
        **({} if scaler is None else {"scaler": scaler}),
        "progress": progress,
        **_averages(trainer, schedulers),
    }


def _averages(trainer: Any, schedulers: list[Any]) -> dict[str, Any]:
    """The callbacks that hold copies of the module, such as weight averages, and the copies."""
    module = trainer.lightning_module
    found: dict[str, Any] = {}
    for callback in trainer.callbacks:
        values = {f"{callback.state_key}.{n}": value for n, value in vars(callback).items()}
        copies = {n: v for n, v in values.items() if isinstance(v, AveragedModel | type(module))}
        if copies and module not in copies.values():
            part = _Averaging(callback, trainer.lr_scheduler_configs, schedulers)
            found |= {callback.state_key: part, **copies}
    return found


class _Averaging:
    """A callback that averages weights, as a part of the state.

    StochasticWeightAveraging replaces the schedulers of the fit (`first`) when it begins, which a
    rollback may undo. Its own `load_state_dict` is for a new fit.
    """

    def __init__(self, callback: Any, schedulers: list[Any], first: list[Any]) -> None:
        self._callback, self._schedulers, self._first = callback, schedulers, first
        self.state_dict = callback.state_dict

    def load_state_dict(self, state: Any) -> None:
        callback = self._callback
        callback.load_state_dict(state)
        if "scheduler_state" not in state or not callback._initialized:
            return
        if state["scheduler_state"] is not None:
            callback.n_averaged.fill_(state["n_averaged"])
            callback._swa_scheduler.load_state_dict(state["scheduler_state"])
        else:
            callback._initialized = False
            callback._swa_scheduler = callback.n_averaged = None
            self._schedulers[:] = self._first
