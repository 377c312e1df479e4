"""Defines `heal_trainer(trainer)`, which rolls back inside a running `Trainer.train()`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from healcore.core.engine import Engine
from healcore.policy import Overrides, Policy, PolicyLike, load
from healcore.policy.loader import resolve
from healcore.policy.trainer_limit import can_apply_limit, with_limit
from healcore.runtime.healer import Healer
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.run_options import (
    CHECKPOINTS,
    LOGGING,
    NO_HOOKS,
    Checkpoints,
    Logging,
)
from healcore.runtime.store import CheckpointStore
from healcore.torch.attachment import unwrapped
from healcore.torch.errors import AttachError
from healcore.torch.trainers import replaced
from healcore.torch.trainers.huggingface import signals
from healcore.torch.trainers.huggingface.callback import HealingCallback
from healcore.torch.trainers.huggingface.dry_run import DryRun, add_hint, read_metrics, trainer_copy
from healcore.torch.trainers.huggingface.epochs import EpochFeed, TrainerEvents, run_epochs
from healcore.torch.trainers.huggingface.out_of_memory import SplitSteps
from healcore.torch.trainers.huggingface.progress import Progress

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput

_METHODS = ("_prepare_for_training", "_run_epoch")
"""Private methods of the Trainer that are replaced while it trains. A release may remove them."""

Store = str | os.PathLike[str] | CheckpointStore | None


def heal_trainer(
    trainer: Trainer,
    policy: PolicyLike = "default",
    *,
    store: Store | Literal["auto"] = "auto",
    loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
    checkpoints: Checkpoints = CHECKPOINTS,
    logging: Logging = LOGGING,
    trackers: object = (),
    hooks: Hooks = NO_HOOKS,
    resume: bool | Literal["auto"] = "auto",
    attach: Mapping[str, Any] | None = None,
    stop_file: str | os.PathLike[str] | None = None,
    **overrides: Unpack[Overrides],
) -> SelfHealingTrainer:
    """Heals a `transformers.Trainer`, or a trainer of TRL, while it trains.

        healed = heal_trainer(trainer, "default")
        healed.train()

    `heal_trainer` also replaces `trainer.train`. To train without healing, create another Trainer.

    The policy judges every step by its loss and its gradient norm, and clips or skips the step.
    When the model is damaged, a rollback restores a known-good checkpoint within the same call of
    `train()`: weights, optimizer, learning-rate schedule, random states, data and the Trainer's
    counters.

    The Trainer does not clip, because the policy needs the norm before clipping. Instead,
    `max_grad_norm` of the TrainingArguments becomes the `max_norm` of the policy's clipping if that
    is higher. Under "default" this limit is then the only clipping, as without healcore.

    Args:
        trainer: the Trainer, constructed as usual.
        policy: as for `healcore.Healer`.
        store: a directory for checkpoints, a store, or None for host memory only, which is lost
            with the process. "auto" is `_healcore` in the trainer's `output_dir`. A restarted
            program with the same store continues the run.
        loss_fn: function that returns the loss of one batch, to compare the current weights with
            earlier weights. "auto" is the trainer's own `compute_loss`, except in a trainer that
            generates its own training data (GRPO, RLOO). With None, no weights are compared.
        checkpoints: as for `healcore.Healer`.
        logging: as for `healcore.Healer`.
        trackers: as for `healcore.Healer`, in addition to the trainer's `report_to`.
        hooks: as for `healcore.Healer`.
        resume: "auto" and True continue an interrupted run, and do not repeat a completed run. If
            the arguments or initial weights have changed since a completed run, or this process has
            completed the run, "auto" raises StoreNotEmpty. False does if the store is not empty.
        attach: options of `healcore.torch.attach`.
        stop_file: as for `healcore.Healer`.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`.

    Returns:
        A wrapper whose `train` heals; it takes all other attributes from the trainer.

    Raises:
        AttachError: `trainer` is not a Trainer, or its configuration cannot be healed.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """
    options: dict[str, Any] = {
        "checkpoints": checkpoints,
        "logging": logging,
        "trackers": trackers,
        "hooks": hooks,
        "resume": resume,
        "attach": attach,
        "stop_file": stop_file,
    }
    return SelfHealingTrainer(
        trainer, resolve(policy, overrides), store=store, loss_fn=loss_fn, options=options
    )


class SelfHealingTrainer:
    """A trainer that rolls back automatically. Created by `heal_trainer`.

    The method `train` of the trainer object is replaced. During `train()` other methods are
    replaced too, and restored afterwards. Methods of a user's subclass are still called.

    Attributes:
        trainer: the original trainer.
    """

    def __init__(
        self,
        trainer: Trainer,
        policy: Policy | Engine,
        *,
        store: Store,
        loss_fn: Callable[[Any], Any] | Literal["auto"] | None,
        options: dict[str, Any],
    ) -> None:
        _check(trainer)
        self.trainer = trainer
        self._limit = signals.max_grad_norm(trainer)
        if can_apply_limit(policy):
            policy, self._limit = with_limit(policy, self._limit), None
        if store == "auto":
            # Trainer.push_to_hub skips names that begin with an underscore.
            store = os.path.join(trainer.args.output_dir or "trainer_output", "_healcore")
        loss_fn = signals.loss_fn_of(trainer) if loss_fn == "auto" else loss_fn
        self._options = {**options, "policy": policy, "store": store, "loss_fn": loss_fn}
        self._run: _Run | None = None
        Healer(state={}, **self._options)  # raises if an option or the policy is invalid
        self._original_train = _replace_train(trainer, self)

    def __getattr__(self, name: str) -> Any:
        """Returns the trainer's attribute."""
        if name in ("trainer", "_run"):  # unset if __init__ raised
            raise AttributeError(name)
        return getattr(self.trainer, name)

    @property
    def healer(self) -> Healer[Any] | None:
        """The Healer of the current or last `train()`, or None before the first."""
        return None if self._run is None else self._run.healer

    def train(
        self,
        resume_from_checkpoint: bool | None = None,
        *,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains like `Trainer.train`, and returns its result.

        Args:
            resume_from_checkpoint: True or None. Both continue from the store, unless the store is
                empty.
            ignore_keys_for_eval: as for `Trainer.train`.

        Raises:
            AttachError: `resume_from_checkpoint` names a checkpoint, or it is True and only the
                Trainer has saved checkpoints. A run can resume from the store only.
            RunStopped: the policy ends the run, with a diagnosis; a SystemExit of status 1.
        """
        if resume_from_checkpoint not in (None, True, False):
            raise AttachError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} conflicts with heal_trainer(), "
                "which continues the run from its store. Omit the argument to continue from "
                f"{self._options['store']}; to start a new run from those weights, load "
                "the model from that directory and pass an empty store"
            )
        if resume_from_checkpoint:
            self._refuse_other_checkpoints()
        _check(self.trainer)
        with ExitStack() as stack:
            self._run = _Run(self.trainer, self._options, self._limit, stack)
            return self._original_train(ignore_keys_for_eval=ignore_keys_for_eval)

    def report(self) -> HealingReport:
        """Returns the report of the run so far: incidents, rollbacks, learning rate, ending.

        Raises:
            AttachError: `train()` has not begun yet.
        """
        run = self._run
        if run is None or run.healer is None:
            raise AttachError("there is nothing to report before train(): call it first")
        return run.healer.report()

    def dry_run(self, steps: int = 2) -> DryRun:
        """Trains a copy for some steps in observe mode, and returns the results.

        The trainer does not change: weights, optimizer, random states, files, `state` and
        callbacks. The copy needs the memory of a second model.

        Args:
            steps: number of optimizer steps, at least 1.

        Raises:
            ValueError: `steps` is not a whole number >= 1.
            Exception: an exception of the training, with a diagnosis as its note.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is a whole number >= 1, not {steps!r}")
        policy = self._options["policy"]
        if isinstance(policy, Policy):
            policy = load(policy, mode="observe")
        else:
            policy = policy.config._replace(mode="observe")
        with trainer_copy(self.trainer, steps) as (trainer, folder):
            metrics = folder / "metrics.jsonl"
            logging = Logging(metrics=metrics)
            options: dict[str, Any] = {"logging": logging, "attach": self._options["attach"]}
            try:
                heal_trainer(trainer, policy, store=None, loss_fn=None, **options).train()
            except Exception as error:
                add_hint(error)
                raise
            return read_metrics(metrics)

    def _refuse_other_checkpoints(self) -> None:
        """Raises AttachError if the store is empty and the Trainer itself has saved checkpoints."""
        from transformers.trainer_utils import get_last_checkpoint

        store, folder = self._options["store"], self.trainer.args.output_dir
        if not isinstance(store, str | os.PathLike) or any(Path(store).glob("step-*")):
            return
        checkpoint = get_last_checkpoint(folder) if folder and os.path.isdir(folder) else None
        if checkpoint is not None:
            raise AttachError(
                "resume_from_checkpoint=True with heal_trainer() continues from the store "
                f"{store}, which is empty, and not from {checkpoint}, which the Trainer "
                "saved. Omit the argument to train from step 0, load the model from that directory "
                "to start with its weights, or finish that run without heal_trainer()"
            )


class _Run:
    """One call of `train()`. Replaces methods of the trainer until `stack` is closed."""

    def __init__(
        self, trainer: Any, options: dict[str, Any], limit: float | None, stack: ExitStack
    ) -> None:
        self.healer: Healer[Any] | None = None
        self._trainer = trainer
        self._options = options
        self._limit = limit
        self._stack = stack
        self._feed: EpochFeed | None = None
        self._progress: Progress | None = None
        self.split = SplitSteps(trainer, self._open_healer, stack)
        for name, replacement in (
            ("_prepare_for_training", self._prepare),
            ("_run_epoch", self._run_epoch),
            ("training_step", self.split.training_step),
            ("_push_from_checkpoint", self._push),
        ):
            call = functools.partial(replacement, getattr(trainer, name))
            stack.enter_context(replaced(trainer, name, call))
        stack.enter_context(signals.unclipped(trainer))
        stack.enter_context(signals.extended_log(trainer, self._metrics))

    def _prepare(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Opens the Healer after the Trainer has created the optimizer, before the first step."""
        trainer, stack = self._trainer, self._stack
        model, loader = original(*args, **kwargs)
        feed = self._feed = EpochFeed(loader)
        progress = self._progress = Progress(trainer, feed, self.split)
        state = {
            "model": trainer.accelerator.unwrap_model(trainer.model),
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": getattr(trainer.accelerator, "scaler", None),
            "progress": progress,
        }
        state = {name: part for name, part in state.items() if part is not None}
        healer = Healer(state=state, **self._options)
        self.healer = stack.enter_context(healer)
        same = progress.max_steps == trainer.state.max_steps
        feed.open(healer, nothing_to_do=healer.run.data.had_completed and same)
        if self._limit is not None:  # the policy's clipping does not enforce it
            optimizer = unwrapped(trainer.optimizer)
            stack.enter_context(signals.clipped_after(trainer, optimizer, self._limit))
        callbacks = trainer.callback_handler.callbacks
        callback = TrainerEvents(feed, healer)
        callbacks.insert(0, callback)
        stack.callback(callbacks.remove, callback)
        return model, loader

    def _run_epoch(self, original: Any, **call: Any) -> None:
        assert self._feed is not None
        assert self._progress is not None
        self._progress.training = True
        run_epochs(self._trainer, self._feed, original, call)

    def _push(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """Pushes a checkpoint to the Hub; retries after a network failure."""
        return self._open_healer().retrying(original)(*args, **kwargs)

    def _open_healer(self) -> Healer[Any]:
        assert self.healer is not None
        return self.healer

    def _metrics(self) -> dict[str, float]:
        return {} if self.healer is None else self.healer.metrics()


def _replace_train(trainer: Any, healed: SelfHealingTrainer) -> Callable[..., Any]:
    """Replaces `trainer.train` by `healed.train`, and returns the original method."""
    original = trainer.train
    if hasattr(original, "__healed__"):  # by an earlier heal_trainer(), under another policy
        original = original.__wrapped__

    @functools.wraps(original)
    def train(*args: Any, trial: Any = None, **kwargs: Any) -> Any:
        if trial is not None or len(args) > 1:
            raise AttachError(
                "hyperparameter_search is not supported with heal_trainer(), because the trials "
                "would share one store: search with a Trainer that has a HealingCallback"
            )
        return healed.train(*args, **kwargs)

    train.__healed__ = healed  # type: ignore[attr-defined]
    trainer.train = train
    return original


def _check(trainer: Any) -> None:
    from transformers import Trainer, __version__

    if isinstance(trainer, SelfHealingTrainer):
        raise AttachError(
            "this trainer is healed already: call its train(), or pass its .trainer to "
            "heal_trainer() to heal it under another policy"
        )
    if not isinstance(trainer, Trainer):
        raise AttachError(
            "heal_trainer takes a transformers.Trainer or a trainer of TRL, not "
            f"{type(trainer).__name__}: for a loop of your own use healcore.Healer"
        )
    if any(not hasattr(Trainer, name) for name in _METHODS):
        raise AttachError(
            f"heal_trainer needs transformers 5.3 or later, and this is {__version__}: upgrade "
            "transformers, or use HealingCallback, which cannot roll back"
        )
    callbacks = trainer.callback_handler.callbacks
    if any(isinstance(callback, HealingCallback) for callback in callbacks):
        raise AttachError(
            "this trainer has a HealingCallback, which would judge the same steps as "
            "heal_trainer(): omit the callback, or call "
            "trainer.remove_callback(HealingCallback) first"
        )
    if trainer.args.auto_find_batch_size:
        raise AttachError(
            "auto_find_batch_size=True restarts the training when memory runs out, and changes "
            "the batch size: set it to False; heal_trainer() splits the batch and keeps its size"
        )
