"""`LightningHealingCallback`: a callback that heals Lightning's `trainer.fit`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.adapter_registry import require
from healcore.console import info
from healcore.core.errors import AttachError
from healcore.policy import PolicyLike
from healcore.policy.loader import can_apply_limit, with_limit
from healcore.runtime.run_options import TrainerOptions
from healcore.runtime.store.store import Places
from healcore.runtime.trainer_access import TrainerAccess, trainer_access_of
from healcore.torch.trainers.hook import TrainerHook, newest_step, patched
from healcore.torch.trainers.lightning.fit import (
    Feed,
    LightningTrainer,
    Progress,
    replaced_fetcher,
)
from healcore.torch.trainers.lightning.step_loss import StepLoss

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    require("lightning", "pytorch_lightning")
    from pytorch_lightning import Callback, LightningModule, Trainer

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


class LightningHealingCallback(TrainerHook, Callback):
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
        store: a directory for checkpoints, a list of them, a store, or None for host memory, which
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
        self._uses_training_step = loss_fn == "auto"
        if loss_fn == "auto":
            loss_fn = None  # a Trainer is needed for it, see `_open_fit`
        super().__init__(policy, {**options, "store": store, "loss_fn": loss_fn})
        self._eval_loss = eval_loss
        self._progress: Progress | None = None
        """The counters of the running fit, or None outside of a fit."""
        self._fit_policy: Any = self._policy
        """The policy, with the Trainer's clipping limit as its own."""
        self._store_has_run = False
        """Whether the fit continues from the store."""
        self._resumed_by_lightning = False
        """Whether the fit continues from Lightning's own checkpoint."""
        self._loaded_engines: Mapping[str, Any] = {}
        """Engine states of the Lightning checkpoint that the fit begins with."""

    # -- start and end --------------------------------------------------------------------------

    def setup(self, trainer: LightningTrainer, pl_module: LightningModule, stage: str) -> None:
        """Checks the strategy, and makes the fit read its batches through the Healer.

        Does nothing for `validate`, `test` and `predict`, and with `fast_dev_run`.

        Raises:
            AttachError: the strategy shards or replaces the optimizer.
        """
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
        open_run = functools.partial(self._run_at_first_batch, trainer)
        progress = self._progress = Progress(trainer, open_run)
        self._fit_policy = self._policy
        newest = trainer.strategy.broadcast(newest_step(self._options["store"]))
        self._store_has_run = newest is not None
        change = self._changes.enter_context
        if newest is not None:
            connector = trainer._checkpoint_connector
            restore = functools.partial(
                self._restore, connector._restore_modules_and_callbacks, newest
            )
            change(patched(connector, "_restore_modules_and_callbacks", restore))
        change(replaced_fetcher(trainer, progress))
        # This callback has to be the first: it restores counters in `on_train_start` before others
        # read them, and saves weights in `on_train_end` before others change them.
        callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        change(patched(trainer, "callbacks", callbacks))

    def _restore(
        self, original: Callable[..., None], newest: int, path: Any = None, *args: Any
    ) -> None:
        """Makes Lightning restore its own checkpoint only if the store has no trained step.

        Programs pass Lightning's newest checkpoint, which may be some steps newer than the store's.
        The store has precedence, because it has the random states and the position in the data:
        the run repeats these steps and ends as if it had not been interrupted.

        Args:
            original: Lightning's own method, which gets the path of a checkpoint, or None.
            newest: step of the newest checkpoint in the store; 0 for the state before training.
            path: Lightning's checkpoint, or None.
            *args: further arguments of Lightning's method.
        """
        if path and newest:
            info(
                f"the store continues the run exactly, from its step {newest}, and not "
                f"Lightning's {path}: newer steps in it are repeated"
            )
            path = None
        elif path:
            self._store_has_run = False  # the Healer replaces the state before training
        original(path, *args)

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Begins a run. Opens its Healer if the store has a checkpoint.

        The hooks of the first epoch then see the epoch of the checkpoint. They may change the
        initial state, so the Healer of a new run is opened with the first batch.
        """
        progress, loop = self._progress, trainer.fit_loop
        if progress is None:
            return
        # LearningRateFinder and BatchSizeFinder set `ckpt_path` too, to a checkpoint of step 0.
        self._resumed_by_lightning = trainer.ckpt_path is not None and trainer.global_step > 0
        limit, change = trainer.gradient_clip_val, self._changes.enter_context
        if limit and trainer.gradient_clip_algorithm != "value" and can_apply_limit(self._policy):
            self._fit_policy = with_limit(self._policy, float(limit))
            change(patched(trainer, "gradient_clip_val", None))
        on_advance_end = loop.epoch_loop.on_advance_end

        def read_last_steps(data_fetcher: Any) -> None:
            """Reads the last steps of an epoch, which may roll the run back into the epoch.

            Lightning requests no batch after the last batch. Its callbacks run before the loop's
            counters are complete, or after the end of the loop.
            """
            on_advance_end(data_fetcher)
            if self.healer is not None and loop.epoch_loop.done:
                self.healer.after_step(last=True)
                # The hooks and schedulers of the epoch follow.
                trainer_access_of(self.healer).mark_step_unfinished()

        change(patched(loop.epoch_loop, "on_advance_end", read_last_steps))
        progress.schedulers = [*trainer.lr_scheduler_configs]
        if not isinstance(loop._data_fetcher, Feed):  # a search has made it
            loop._data_fetcher = Feed(trainer, progress)
            loop._data_fetcher.setup(loop._combined_loader, begun=True)
        if self._store_has_run:
            self._resume(trainer, progress)

    def _resume(self, trainer: LightningTrainer, progress: Progress) -> None:
        """Opens the Healer of a run that continues, before the hooks of the first epoch."""
        loop = trainer.fit_loop
        access = self._open_fit(trainer, progress)
        loop._resuming_from_checkpoint = True  # otherwise it calls `iter` once more, which draws
        if access.had_completed and progress.saved_limits == progress.limits():
            trainer.should_stop = True  # also a fit that another callback has stopped
        if loop._should_reload_train_dl:
            epoch, every = trainer.current_epoch, trainer.reload_dataloaders_every_n_epochs
            count = loop.epoch_progress.current
            count.completed -= epoch % every  # `train_dataloader` may read `current_epoch`
            loop.setup_data()
            count.completed = epoch

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Ends the run, which saves the last state.

        Lightning calls this after the last epoch. Other callbacks may change weights in the same
        hook, so this callback is the first of the fit.
        """
        self._end(None)

    def on_exception(
        self, trainer: Trainer, pl_module: LightningModule, exception: BaseException
    ) -> None:
        """Ends the run with the exception, which writes a postmortem.

        Lightning does not call `teardown` after an exception.

        Args:
            trainer: the Trainer.
            pl_module: the module.
            exception: the exception that ends the fit, also KeyboardInterrupt and SystemExit.
        """
        self._end(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the run, and restores the Trainer's `gradient_clip_val`.

        After `on_train_end` there is nothing left to do. A fit that trained no epoch has only this
        hook.
        """
        self._end(None)

    def _end(self, error: BaseException | None) -> None:
        """Restores the Trainer, and ends the Healer. A second call does nothing."""
        if self._progress is None:
            return
        self._progress = None
        self._loaded_engines = {}
        if self.healer is not None and type(error).__name__ == "SIGTERMException":
            # Lightning raises this after a step, before the Healer has processed the step.
            try:
                self.healer.after_step()
            except BaseException as ended:
                by_lightning: Any = error
                # Without this exit status, Lightning would exit with 0.
                by_lightning.code = getattr(ended, "code", 1)
                error = ended
        self._close(error)

    def state_dict(self) -> dict[str, Any]:
        """The states of the engines for Lightning's checkpoints. One sync on a GPU.

        A fit that continues from such a checkpoint, without a store, keeps the baselines, budgets
        and learning-rate multipliers of the policy.

        Returns:
            "engines" -> name of an optimizer -> state; empty before the first batch.
        """
        engines = self._engines()
        if not engines:
            return {}
        return {"engines": engines}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Keeps the engine states of a Lightning checkpoint for the fit that begins.

        Lightning calls this before the optimizers exist, so that the states are loaded when the
        Healer is opened.

        Args:
            state_dict: a result of `state_dict`.
        """
        self._loaded_engines = state_dict.get("engines", {})

    # -- the steps ------------------------------------------------------------------------------

    def on_train_batch_start(
        self, trainer: LightningTrainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Logs the counts that have changed (`heal/skips`, ...), every `log_every_n_steps`.

        Calls the loggers itself, as LearningRateMonitor does: `self.log` would copy each number to
        the device.
        """
        if self._progress is None or not trainer.loggers:
            return
        if not trainer._logger_connector.should_update_logs:
            return
        metrics = self._new_metrics()
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=trainer.fit_loop.epoch_loop._batches_that_stepped)

    def on_train_batch_end(self, trainer: LightningTrainer, *_: Any) -> None:
        """Within an accumulation, defers the end by SIGTERM to the step, which can be saved.

        Lightning ends the fit after the micro-batch of the signal, and its gradients would be lost.
        The Healer remembers the signal.
        """
        if self._progress is None or self.healer is None or not trainer.received_sigterm:
            return
        if trainer_access_of(self.healer).driver.window.is_accumulating():
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
        """Drops the losses since the last step for the optimizers that do not step.

        A loss is observed for every optimizer, because a module with manual optimization says only
        here to which optimizer the loss belongs.
        """
        for healing in self.healings.values():
            if healing.optimizer is not optimizer:
                healing.healed_step.measurer.losses.clear()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Observes the loss of the evaluation.

        Does nothing without the argument `eval_loss`, in the sanity check before the training, and
        if validation has not logged a metric of that name.
        """
        if self._progress is None or trainer.sanity_checking or self._eval_loss is None:
            return
        value = trainer.callback_metrics.get(self._eval_loss)
        if value is not None and self.healer is not None:
            self.healer.observe(eval_loss=value)

    # -- opening the run ------------------------------------------------------------------------

    def _run_at_first_batch(self, trainer: LightningTrainer) -> TrainerAccess:
        """The open run, when Lightning requests the first batch.

        Every checkpoint is taken at this point of the loop, so a rollback can restore the loop's
        counters. Hooks have run since the run was opened, so the checkpoint is loaded again.
        """
        assert self._progress is not None
        if self.healer is None:
            access = self._open_fit(trainer, self._progress)
        else:
            access = trainer_access_of(self.healer)
        access.reload_before_first_batch()
        return access

    def _open_fit(self, trainer: LightningTrainer, progress: Progress) -> TrainerAccess:
        """Opens the Healer, which resumes the run in its store."""
        loss_fn = self._options["loss_fn"]

        def as_passed(batch: Any) -> Any:
            return trainer.fit_loop._data_fetcher.as_passed(batch)

        def loss_on_device(batch: Any) -> Any:
            return loss_fn(trainer.strategy.batch_to_device(as_passed(batch)))

        passed: Any = None if loss_fn is None else loss_on_device
        if self._uses_training_step:
            passed = StepLoss(trainer, as_passed)
            if passed.obstacle:
                info(
                    "no weights are compared, because training_step cannot be called again: "
                    f"{passed.obstacle}; pass loss_fn=, a function that returns the loss of a batch"
                )
                passed = None
        access = self._open(self._fit_policy, progress.state_of_fit(), loss_fn=passed)
        if trainer.lightning_module.automatic_optimization:
            self._clip_after_judging(trainer.precision_plugin)
        if self._resumed_by_lightning:
            self._adopt(self._loaded_engines)
        return access

    def _clip_after_judging(self, plugin: Any) -> None:
        """Postpones Lightning's clipping of a step until the policy has judged it.

        Lightning clips in the closure of a step, which is evaluated before the policy judges.
        """
        clip_now = plugin.clip_gradients
        postponed: dict[Optimizer, Callable[[], None]] = {}
        steps = {each.optimizer: each.healed_step for each in self.healings.values()}

        def clip(optimizer: Optimizer, *args: Any, **kwargs: Any) -> None:
            call = functools.partial(clip_now, optimizer, *args, **kwargs)
            if optimizer not in steps or steps[optimizer].in_update:  # L-BFGS evaluates again
                call()
            else:
                postponed[optimizer] = call

        def judged_and_clipped(optimizer: Optimizer, judged: Any, measured: Any) -> None:
            judged(measured)
            if optimizer in postponed:
                postponed.pop(optimizer)()

        change = self._changes.enter_context
        for optimizer, step in steps.items():
            judged = functools.partial(judged_and_clipped, optimizer, step.listener.judged)
            change(patched(step.listener, "judged", judged))
        change(patched(plugin, "clip_gradients", clip))
