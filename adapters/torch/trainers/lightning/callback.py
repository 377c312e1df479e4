"""`LightningHealingCallback`: a callback that heals Lightning's `trainer.fit`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Unpack

import torch
from torch import Tensor
from torch.optim import Optimizer

from healcore.adapter_registry import require
from healcore.console import info
from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.policy import Policy, PolicyLike
from healcore.policy.loader import can_apply_limit, with_limit
from healcore.runtime.healer import Healer
from healcore.runtime.run.incidents.metrics import changed_since
from healcore.runtime.run_options import HostPolicy, TrainerOptions
from healcore.runtime.store.places import Places
from healcore.runtime.trainer_access import TrainerAccess, open_healer, trainer_access_of
from healcore.torch.attachment import Healing
from healcore.torch.trainers.hook import newest_step, patched
from healcore.torch.trainers.lightning import trainer_internals as internals
from healcore.torch.trainers.lightning.clipping import clipping_after_measuring
from healcore.torch.trainers.lightning.feed import Feed, replaced_fetcher
from healcore.torch.trainers.lightning.fit_state import state_of_fit
from healcore.torch.trainers.lightning.progress import Progress
from healcore.torch.trainers.lightning.step_loss import StepLoss
from healcore.torch.trainers.lightning.trainer_internals import Batch, FitLoop, LightningTrainer
from healcore.torch.trainers.options import resolve_options
from healcore.torch.trainers.policy_state import adopt_trainer_checkpoint, healings_of

if TYPE_CHECKING or importlib.util.find_spec("lightning") is not None:
    from lightning.pytorch import Callback, LightningModule, Trainer
else:
    require("lightning", "pytorch_lightning")
    from pytorch_lightning import Callback, LightningModule, Trainer

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")


@dataclass
class _Fit:
    """The facts of one `trainer.fit`, from `setup` to its end."""

    progress: Progress
    """The counters of the fit."""
    policy: Policy | Engine
    """The policy, with the Trainer's clipping limit as its own."""
    store_has_run: bool = False
    """Whether the run continues from the store."""
    resumed_by_lightning: bool = False
    """Whether the run continues from Lightning's own checkpoint."""
    schedulers: list[Any] = field(default_factory=list)
    """Lightning's configurations of the learning-rate schedulers with which the fit begins."""


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
        healer_options: dict[str, Any] = {**options, "store": store, "loss_fn": loss_fn}
        if loss_fn == "auto":
            healer_options["loss_fn"] = None  # a Trainer is needed for it, see `_open`
        self._policy, self._options = resolve_options(policy, healer_options)
        # Without a rollback weights are not compared.
        rolls_back = HostPolicy.of(self._policy, {}).rolls_back
        self._uses_training_step = loss_fn == "auto" and rolls_back
        self._eval_loss = eval_loss
        self.healer: Healer[Any] | None = None
        self._fit: _Fit | None = None
        """The running fit, or None outside of a fit."""
        self._changes = ExitStack()
        """Restores the Trainer and its loops."""
        self._logged: dict[str, float] = {}
        """The metrics of the last row of the log."""
        self._loaded_engines: Mapping[str, Any] = {}
        """Engine states of the Lightning checkpoint that the fit begins with."""

    @property
    def healings(self) -> Mapping[str, Healing]:
        """Handles of the optimizers of the last fit, as `healcore.torch.attach` returns them.

        Use them to read the newest decision, or to announce a change of the training.

        Returns:
            Name -> handle: "optimizer", or "optimizer0", "optimizer1", ... for several optimizers.
            Empty before the first batch.
        """
        return healings_of(self.healer)

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
        progress = Progress(trainer)
        fit = self._fit = _Fit(progress, self._policy)
        progress.open_run = functools.partial(self._run_at_first_batch, trainer, fit)
        newest = trainer.strategy.broadcast(newest_step(self._options["store"]))
        fit.store_has_run = newest is not None
        if newest is not None:
            self._choose_checkpoint(trainer, fit, newest)
        self._changes.enter_context(replaced_fetcher(trainer, progress))
        # This callback has to be the first: it restores counters in `on_train_start` before others
        # read them, and saves weights in `on_train_end` before others change them.
        callbacks = [self, *(each for each in trainer.callbacks if each is not self)]
        self._changes.enter_context(patched(trainer, "callbacks", callbacks))

    def _choose_checkpoint(self, trainer: LightningTrainer, fit: _Fit, newest: int) -> None:
        """Makes Lightning restore its own checkpoint only if the store has no trained step.

        Programs pass Lightning's newest checkpoint, which may be some steps newer than the store's.
        The store has precedence, because it has the random states and the position in the data:
        the run repeats these steps and ends as if it had not been interrupted.

        Args:
            trainer: the Trainer, in `setup` of the fit.
            fit: its `store_has_run` becomes False if Lightning restores its own checkpoint.
            newest: step of the newest checkpoint in the store; 0 for the state before training.
        """

        def restore_one(
            restore: Callable[..., None], checkpoint_path: Any, *args: Any, **options: Any
        ) -> None:
            if checkpoint_path and not newest:
                fit.store_has_run = False  # the Healer replaces the state before training
                restore(checkpoint_path, *args, **options)
                return
            if checkpoint_path:
                info(
                    f"the store continues the run exactly, from its step {newest}, and not "
                    f"Lightning's {checkpoint_path}: newer steps in it are repeated"
                )
            restore()

        self._changes.enter_context(internals.replaced_restore(trainer, restore_one))

    def on_train_start(self, trainer: LightningTrainer, pl_module: LightningModule) -> None:
        """Begins a run. Opens its Healer if the store has a checkpoint.

        The hooks of the first epoch then see the epoch of the checkpoint. They may change the
        initial state, so the Healer of a new run is opened with the first batch.
        """
        fit = self._fit
        if fit is None:
            return
        # LearningRateFinder and BatchSizeFinder set `ckpt_path` too, to a checkpoint of step 0.
        fit.resumed_by_lightning = trainer.ckpt_path is not None and trainer.global_step > 0
        if fit.resumed_by_lightning and self._options["store"] is not None:
            path = trainer.ckpt_path
            info(f"Lightning's {path} continues the run, because the store has no trained step")
        limit = trainer.gradient_clip_val
        if limit and trainer.gradient_clip_algorithm != "value" and can_apply_limit(self._policy):
            fit.policy = with_limit(self._policy, float(limit))
            self._changes.enter_context(patched(trainer, "gradient_clip_val", None))
        loop = trainer.fit_loop
        self._read_last_steps_of_epochs(loop)
        fit.schedulers = [*trainer.lr_scheduler_configs]
        if not isinstance(internals.fetcher_of(loop), Feed):  # a search has made it
            feed = Feed(trainer, fit.progress)
            internals.set_fetcher(loop, feed)
            feed.setup(internals.combined_loader_of(loop), begun=True)
        if fit.store_has_run:
            self._resume(trainer, fit)

    def _read_last_steps_of_epochs(self, fit: FitLoop) -> None:
        """Replaces a method of Lightning's loop, because no callback runs at its moment."""
        loop = fit.epoch_loop
        loop_on_advance_end = loop.on_advance_end

        def read_last_steps(data_fetcher: Any) -> None:
            """Reads the last steps of an epoch, which may roll the run back into the epoch.

            Lightning requests no batch after the last batch. Its callbacks run before the loop's
            counters are complete, or after the end of the loop.
            """
            loop_on_advance_end(data_fetcher)
            if self.healer is not None and loop.done:
                self.healer.after_step(last=True)
                # The hooks and schedulers of the epoch follow.
                trainer_access_of(self.healer).mark_step_unfinished()

        self._changes.enter_context(patched(loop, "on_advance_end", read_last_steps))

    def _resume(self, trainer: LightningTrainer, fit: _Fit) -> None:
        """Opens the Healer of a run that continues, before the hooks of the first epoch."""
        loop = trainer.fit_loop
        access = self._open(trainer, fit)
        internals.mark_resumed(loop)
        if access.had_completed and fit.progress.saved_limits == fit.progress.limits():
            trainer.should_stop = True  # also a fit that another callback has stopped
        if internals.reloads_dataloaders_now(loop):
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
        self._close(None)

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
        self._close(exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Ends the run, and restores the Trainer's `gradient_clip_val`.

        After `on_train_end` there is nothing left to do. A fit that trained no epoch has only this
        hook.
        """
        self._close(None)

    def _close(self, error: BaseException | None) -> None:
        """Restores the Trainer, and ends the Healer. A second call does nothing.

        Args:
            error: the exception that ends the fit, or None.
        """
        self._changes.close()
        fit = self._fit
        self._fit = None
        if fit is None or self.healer is None:
            return
        self._loaded_engines = {}
        if type(error).__name__ == "SIGTERMException":
            # Lightning raises this after a step, before the Healer has processed the step.
            try:
                self.healer.after_step()
            except BaseException as ended:
                by_lightning: Any = error
                # Without this exit status, Lightning would exit with 0.
                by_lightning.code = getattr(ended, "code", 1)
                error = ended
        self.healer.close(error)

    def state_dict(self) -> dict[str, Any]:
        """The states of the engines for Lightning's checkpoints. One sync on a GPU.

        A fit that continues from such a checkpoint, without a store, keeps the baselines, budgets
        and learning-rate multipliers of the policy.

        Returns:
            "engines" -> name of an optimizer -> state; empty before the first batch.
        """
        engines = {name: healing.state_dict() for name, healing in self.healings.items()}
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
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Logs the counts that have changed (`heal/skips`, ...), every `log_every_n_steps`.

        Calls the loggers itself, as LearningRateMonitor does: `self.log` would copy each number to
        the device.
        """
        if self._fit is None or not internals.logs_this_step(trainer):
            return
        metrics: dict[str, float] = {}
        if trainer.loggers and self.healer is not None:
            metrics = changed_since(self._logged, self.healer.metrics())
        for logger in trainer.loggers if metrics else ():
            logger.log_metrics(metrics, step=internals.logged_step(trainer.fit_loop))

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:  # type: ignore[override]
        """Within an accumulation, defers the end by SIGTERM to the step, which can be saved.

        Lightning ends the fit after the micro-batch of the signal, and its gradients would be lost.
        """
        if self._fit is None or self.healer is None or not trainer.received_sigterm:
            return
        if trainer_access_of(self.healer).driver.window.is_accumulating():
            internals.put_off_sigterm(trainer)

    def on_before_backward(
        self, trainer: Trainer, pl_module: LightningModule, loss: Tensor
    ) -> None:
        """Observes the loss of one (micro-)batch as `training_step` returned it. No sync.

        With several optimizers (manual optimization), the loss belongs to the optimizer that steps
        next. A GAN's generator is therefore not judged by the discriminator's loss.
        """
        if self._fit is None:
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
        if self._fit is None or trainer.sanity_checking or self._eval_loss is None:
            return
        value = trainer.callback_metrics.get(self._eval_loss)
        if value is not None and self.healer is not None:
            self.healer.observe(eval_loss=value)

    # -- opening the run ------------------------------------------------------------------------

    def _run_at_first_batch(self, trainer: LightningTrainer, fit: _Fit) -> TrainerAccess:
        """The open run, when Lightning requests the first batch.

        Every checkpoint is taken at this point of the loop, so a rollback can restore the loop's
        counters. Hooks have run since an earlier `_open`, so the checkpoint is loaded again.
        """
        if self.healer is None:
            access = self._open(trainer, fit)
        else:
            access = trainer_access_of(self.healer)
        access.reload_before_first_batch()
        return access

    def _open(self, trainer: LightningTrainer, fit: _Fit) -> TrainerAccess:
        """Opens the Healer, which resumes the run in its store."""
        options = dict(self._options)
        loss_fn = options["loss_fn"]
        if loss_fn is not None:

            def loss_on_device(batch: Batch) -> Any:
                passed = internals.fetcher_of(trainer.fit_loop).as_passed(batch)
                return loss_fn(trainer.strategy.batch_to_device(passed))

            options["loss_fn"] = loss_on_device
        elif self._uses_training_step:
            options["loss_fn"] = self._training_loss(trainer)
        state = state_of_fit(trainer, fit.progress, fit.schedulers)
        healer = Healer(fit.policy, state=state, **options)
        access = open_healer(healer)
        self.healer = healer
        self._logged = {}
        if trainer.lightning_module.automatic_optimization:
            clipping = clipping_after_measuring(trainer.precision_plugin, self.healings)
            self._changes.enter_context(clipping)
        if fit.resumed_by_lightning:
            adopt_trainer_checkpoint(healer, self._loaded_engines)
        return access

    def _training_loss(self, trainer: LightningTrainer) -> StepLoss | None:
        """The loss by `training_step`, or None with a line if the call cannot be undone."""

        def as_passed(batch: Batch) -> Batch:
            return internals.fetcher_of(trainer.fit_loop).as_passed(batch)

        loss = StepLoss(trainer, as_passed)
        obstacle = loss.obstacle
        if obstacle:
            info(
                "no weights are compared, because training_step cannot be called again: "
                f"{obstacle}; pass loss_fn=, a function that returns the loss of a batch"
            )
            return None
        return loss
