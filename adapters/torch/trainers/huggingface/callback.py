"""`HealingCallback` and `heal_trainer`: heal any transformers or TRL Trainer."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Unpack

from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from healcore.core.engine import Engine
from healcore.core.errors import AttachError
from healcore.policy import Policy, PolicyLike, from_dict, to_dict
from healcore.policy.loader import can_apply_limit, with_limit
from healcore.runtime.healer import Healer
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.run_options import LOGGING, TrainerOptions
from healcore.runtime.store.places import Places
from healcore.runtime.trainer_access import trainer_access_of
from healcore.torch.attachment import Healing
from healcore.torch.gradients import parameters
from healcore.torch.store import MemoryStore
from healcore.torch.trainers.huggingface import checkpoints
from healcore.torch.trainers.huggingface import trainer_internals as internals
from healcore.torch.trainers.huggingface.batch_loss import loss_fn_of
from healcore.torch.trainers.huggingface.clipping import stop_clipping
from healcore.torch.trainers.huggingface.counters import Counters
from healcore.torch.trainers.huggingface.dry_run import DryRun, train_copy
from healcore.torch.trainers.huggingface.epochs import EpochFeed
from healcore.torch.trainers.huggingface.log_rows import extend_log
from healcore.torch.trainers.huggingface.steps import SplitSteps
from healcore.torch.trainers.huggingface.trainer_hook import wrap_train_when_added
from healcore.torch.trainers.huggingface.trainer_internals import HfTrainer
from healcore.torch.trainers.options import resolve_options
from healcore.torch.trainers.patching import patched
from healcore.torch.trainers.policy_state import adopt_trainer_checkpoint, healings_of
from healcore.torch.trainers.stored_run import newest_step
from healcore.torch.trainers.trainer_checkpoints import TrainerCheckpoints

_FOLDER = "_healcore"
"""Directory in the Trainer's `output_dir`. `push_to_hub` skips names with a leading underscore."""


class HealingCallback(TrainerCallback, ExportableState):
    """Heals a Trainer: clips and skips steps, splits batches that do not fit, rolls back.

        trainer = Trainer(..., callbacks=[HealingCallback("default", store="auto")])

    The policy judges every step by its unrounded loss and its gradient norm before clipping.

    With a `store`, a rollback restores a known-good checkpoint within the same call of `train()`:
    weights, optimizer, learning-rate schedule, random states, data and the Trainer's counters. A
    restarted program resumes from the store. Without a `store`, the callback keeps no copy of the
    state and cannot roll back: if the policy orders a rollback, `train()` raises `RunStopped`. Such
    a run resumes from the Trainer's checkpoints, which hold the policy's state.

    The Trainer does not clip, because the policy needs the norm before clipping. Instead,
    `max_grad_norm` of the TrainingArguments becomes the `max_norm` of the policy's clipping if that
    is higher. Under "default" this limit is then the only clipping, as without healcore.

    Args:
        policy: as for `healcore.Healer`, or a mapping as in a checkpoint's trainer_state.json.
        store: a directory for checkpoints, a list of them, a store, "auto" for `_healcore` in the
            trainer's `output_dir`, or None for no rollbacks.
        loss_fn: function that returns the loss of one batch, to compare the current weights with
            earlier weights. "auto" is the trainer's own `compute_loss`, except in a trainer that
            generates its own training data (GRPO, RLOO). With None, or without a store, no weights
            are compared.
        **options: further arguments of `healcore.Healer` (`checkpoints`, `logging`, `trackers`,
            ...) and values to replace in the policy, `clip={"max_norm": 1.0}`. `resume="auto"` and
            True do not repeat a completed run. `trackers` are in addition to the Trainer's
            `report_to`. Without `Logging(events=)`, events are written to `_healcore` in the
            trainer's `output_dir` if the store is no directory.

    Attributes:
        trainer: the Trainer of the current or last `train()`, or None before the first.
        healer: the Healer of the current or last `train()`, or None before the first.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """

    def __init__(
        self,
        policy: PolicyLike | Mapping[str, Any] = "default",
        *,
        store: Places = None,
        loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
        **options: Unpack[TrainerOptions],
    ) -> None:
        if isinstance(policy, Mapping):
            policy = from_dict(policy)
        self.policy, self._options = resolve_options(policy, options)
        self._store = store
        self._loss_fn = loss_fn
        self.trainer: HfTrainer = None
        self.healer: Healer[Any] | None = None
        self.added_to: HfTrainer = None
        """The Trainer that has this callback among its callbacks, or None before it is added."""
        self._feed: EpochFeed | None = None
        self._open_healer: Healer[Any] | None = None
        """The Healer during `train()`, otherwise None."""
        self._changes = ExitStack()
        """Ends the Healer, and restores the Trainer."""

    @property
    def healing(self) -> Healing | None:
        """The handle of the optimizer, as `healcore.torch.attach` returns it.

        Use it to read the newest decision, or to announce a change of the training.

        Returns:
            The handle of the current or last `train()`, or None before the first.
        """
        return healings_of(self.healer).get("optimizer")

    def report(self) -> HealingReport:
        """The report of the run so far: incidents, rollbacks, learning rate, ending.

        Returns:
            Data for tables and tests; `str(report)` is the text for a person.

        Raises:
            AttachError: `train()` has not begun yet.
        """
        if self.healer is None:
            raise AttachError("there is nothing to report before train(): call it first")
        return self.healer.report()

    def train(self, *args: Any, **kwargs: Any) -> TrainOutput:
        """Trains the trainer of `heal_trainer`: `trainer.train(*args, **kwargs)`.

        Args:
            *args: as for the trainer's own `train`.
            **kwargs: as for the trainer's own `train`.

        Returns:
            The result of the trainer's `train`: steps, mean loss, metrics.

        Raises:
            AttachError: this callback was not created by `heal_trainer`, and has not trained yet.
        """
        return self._known_trainer().train(*args, **kwargs)

    def dry_run(self, steps: int = 2) -> DryRun:
        """Trains a copy for some steps in observe mode, and returns the results.

        The trainer does not change: weights, optimizer, random states, files, `state` and
        callbacks. The copy needs the memory of a second model.

        Args:
            steps: number of optimizer steps, at least 1.

        Raises:
            AttachError: this callback was not created by `heal_trainer`.
            ValueError: `steps` is not a whole number >= 1.
            Exception: an exception of the training, with a diagnosis as its note.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is a whole number >= 1, not {steps!r}")
        observing = functools.partial(HealingCallback, attach=self._options.get("attach"))
        return train_copy(self._known_trainer(), steps, self.policy, observing)

    def _known_trainer(self) -> HfTrainer:
        if self.trainer is None:
            raise AttachError("the callback has no Trainer yet: use heal_trainer(trainer)")
        return self.trainer

    # -- the Trainer's checkpoints --------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The arguments and the state of this object, which the Trainer saves.

        The Trainer calls this for its checkpoints and writes the result to `trainer_state.json`.
        With `restore_callback_states_from_checkpoint` it creates the callback from the arguments.

        Returns:
            "args" -> the policy and the store, as far as JSON holds them; "attributes" ->
            "engines" -> the state of the policy for each optimizer, empty before `train()`.
        """
        engines: Mapping[str, Any] = {}
        if self.healer is not None:
            engines = trainer_access_of(self.healer).driver.engines()
        args: dict[str, Any] = {}
        if isinstance(self.policy, Policy):
            args["policy"] = to_dict(self.policy)
        store = _saved_argument(self._store)
        if store is not None:
            args["store"] = store
        return {"args": args, "attributes": {"engines": engines}}

    def _load_state(self, healer: Healer[Any], state: TrainerState) -> None:
        """Loads the policy's state from the checkpoint that the Trainer has resumed from.

        The attribute `engines` cannot be used: the Trainer sets it only with the option
        `restore_callback_states_from_checkpoint`, on a new object that a later `train()` may reuse.
        """
        exported: Any = state.stateful_callbacks
        # transformers 5.23 raises KeyError at the next save if the checkpoint lacked this entry.
        entry = exported.setdefault(type(self).__name__, {})
        # The Trainer makes a list for several callbacks of a class.
        if isinstance(entry, list):
            entry = entry[0]
        engines = entry.get("attributes", {}).get("engines", {})
        adopt_trainer_checkpoint(healer, engines, step=state.global_step)

    # -- the Trainer's events -------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the Healer, and inserts it into the training loop.

        The Trainer calls this when model, optimizer and loss sums exist, before the first epoch.

        Raises:
            AttachError: the Trainer cannot be healed, or the callback was not given to a Trainer.
        """
        if self.added_to is None:
            raise AttachError(
                "HealingCallback belongs to no Trainer: pass it to a transformers Trainer in "
                "callbacks=[...] or call trainer.add_callback(callback), not callback_handler's; "
                "in a loop of your own heal the optimizer with healcore.torch.attach"
            )
        if self._open_healer is not None:
            self.close(RuntimeError("an exception outside of the epochs has ended train()"))
        trainer = self.trainer = self.added_to
        self._check(trainer, state, kwargs.get("train_dataloader"))
        callbacks = trainer.callback_handler.callbacks
        callbacks.remove(self)
        callbacks.insert(0, self)  # other callbacks then read the corrected `state.epoch`
        if self._store is not None:
            self._feed = EpochFeed(trainer, kwargs["train_dataloader"])
        try:
            self._begin(trainer, state)
        except BaseException as error:
            self.close(error)
            raise

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Does the Healer's work between two steps, or corrects `state.epoch`.

        With a store the Healer works when the Trainer asks for the next batch, where a rollback can
        leave the epoch. Without a store nothing is rolled back, and the Healer works here.
        """
        if self._feed is not None:
            self._feed.correct_epoch(state)
        elif self._open_healer is not None:
            self._open_healer.after_step()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports the evaluation's loss to policies that read it.

        Does nothing outside of `train()`, and if the metrics have no `eval_loss`: with several
        evaluation data sets, the Trainer names each loss after its data set.
        """
        metrics = kwargs.get("metrics") or {}
        if self._open_healer is not None and "eval_loss" in metrics:
            self._open_healer.observe(eval_loss=metrics["eval_loss"])

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Ends the Healer, and restores the Trainer.

        The Trainer calls this after the last step, before it returns from `train()`. It does not
        call this if the training raises: the replaced `train()` then calls `close`.
        """
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the Healer, and restores the Trainer. A second call does nothing.

        Args:
            error: the exception that ends the training, or None.
        """
        changes = self._changes
        self._changes = ExitStack()
        self._open_healer = self._feed = None
        if error is None:
            changes.close()
        else:  # the Healer in the stack ends with this error
            changes.__exit__(type(error), error, error.__traceback__)

    def _begin(self, trainer: HfTrainer, state: TrainerState) -> None:
        """Opens the Healer, and replaces methods of the Trainer until `close`."""
        stack, feed, policy = self._changes, self._feed, self.policy
        limit = max(float(trainer.args.max_grad_norm or 0.0), 0.0) or None
        if can_apply_limit(policy):
            policy = with_limit(policy, limit)
            limit = None
        counters = Counters(trainer, feed, self)
        healer = self.healer = stack.enter_context(self._healer(trainer, policy, counters))
        if feed is not None:
            counters.begin()
            feed.healer = healer
            completed = trainer_access_of(healer).had_completed
            feed.nothing_to_do = completed and counters.saved_max_steps == state.max_steps
        elif state.global_step:
            self._load_state(healer, state)
        split = SplitSteps(trainer, healer, counters, stack)
        training_step = functools.partial(split.training_step, trainer.training_step)
        stack.enter_context(patched(trainer, "training_step", training_step))
        stack.enter_context(internals.replaced_epoch(trainer, self._run_epoch))
        stop_clipping(trainer, limit, stack)
        extend_log(trainer, healer.metrics, stack)
        self._open_healer = healer

    def _healer(
        self, trainer: HfTrainer, policy: Policy | Engine, counters: Counters
    ) -> Healer[Any]:
        """The Healer of one `train()`, not yet open."""
        options = dict(self._options)
        if self._feed and trainer.state.global_step:
            options.setdefault("resume", True)  # the initial weights are the Trainer's checkpoint
        loss_fn: Any = self._loss_fn
        store: Any = self.resolved_store(trainer)
        if isinstance(store, type):  # heal_trainer(store=None) passes the class
            store = store()
        if getattr(store, "root", store) is None:
            logging = options.get("logging", LOGGING)
            events = logging.events or _folder(trainer) / "healcore.events.jsonl"
            options["logging"] = dataclasses.replace(logging, events=events)
        if store is None:
            loss_fn = None
            store = TrainerCheckpoints(functools.partial(_save_now, trainer))
        elif loss_fn == "auto":
            loss_fn = loss_fn_of(trainer)
        state = _state_of(trainer, counters)
        return Healer(policy, state=state, store=store, loss_fn=loss_fn, **options)

    def resolved_store(self, trainer: HfTrainer) -> Places:
        """The store, with the directory of "auto"."""
        if self._store == "auto":
            return _folder(trainer)
        return self._store

    def _run_epoch(self, original: Callable[..., None], **call: Any) -> None:
        """Runs an epoch with the Healer's batches. Ends the Healer if an exception is raised."""
        try:
            if self._feed is None:
                original(**call)
            else:
                self._feed.run(original, call)
        except BaseException as error:
            self.close(error)
            raise

    def _check(self, trainer: HfTrainer, state: TrainerState, loader: Any) -> None:
        """Raises AttachError for a Trainer that cannot be healed."""
        distributed = str(getattr(trainer.accelerator.distributed_type, "value", ""))
        if distributed == "DEEPSPEED":
            raise AttachError(
                "a Trainer with DeepSpeed is not supported, because its engine clips, skips and "
                "steps by itself: use healcore.torch.heal_engine in a loop of your own"
            )
        if distributed == "FSDP" and not trainer.accelerator.is_fsdp2:
            raise AttachError(
                "FSDP 1 is not supported, because a rank has only the norm of its shard: use "
                'FSDP 2, TrainingArguments(fsdp_config={"fsdp_version": 2})'
            )
        if self._store is None:
            return
        if loader is None:
            raise AttachError(
                f"{type(trainer).__name__} has a loop of its own: use HealingCallback()"
            )
        # The Trainer has loaded its own checkpoint before it calls an added callback. It runs no
        # epoch after its last step, and a store with its first checkpoint needs those weights.
        stored = newest_step(self.resolved_store(trainer))
        newest = stored or 0
        if state.global_step and (not newest or newest < state.max_steps <= state.global_step):
            has = "no checkpoint"
            if stored is not None:
                has = f"a checkpoint of step {stored}"
            raise AttachError(
                f"resume_from_checkpoint conflicts with the store, which has {has} and continues a "
                f"run only by its own checkpoints, while the Trainer's is of step "
                f"{state.global_step}: omit the argument; to start a new run from those weights, "
                "load the model from that directory and pass an empty store"
            )
        if state.is_hyper_param_search:
            raise AttachError(
                "hyperparameter_search is not supported with a store, which the trials would "
                "share: use HealingCallback without a store"
            )


def heal_trainer(
    trainer: Trainer,
    policy: PolicyLike = "default",
    *,
    store: Places = "auto",
    loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
    **options: Unpack[TrainerOptions],
) -> HealingCallback:
    """Adds a `HealingCallback` with a store to a Trainer, in place of an earlier callback.

        healed = heal_trainer(trainer, "default")
        healed.train()  # or trainer.train()

    Args:
        trainer: a `transformers.Trainer`, or a trainer of TRL.
        policy: as for `HealingCallback`.
        store: as for `HealingCallback`, but None is host memory, which lasts for one `train()`.
        loss_fn: as for `HealingCallback`.
        **options: as for `HealingCallback`.

    Returns:
        The callback, with `train`, `dry_run` and `report`.

    Raises:
        AttachError: `trainer` is not a Trainer.
        healcore.policy.PolicyError: the policy does not exist or is invalid.
        ValueError, TypeError: an option is out of range or unknown.
    """
    if not isinstance(trainer, Trainer):
        raise AttachError(
            "heal_trainer takes a transformers.Trainer or a trainer of TRL, not "
            f"{type(trainer).__name__}: for a loop of your own use healcore.Healer"
        )
    given: Any = store
    if store is None:
        given = MemoryStore  # the class, for a new memory in each `train()`
    callback = HealingCallback(policy, store=given, loss_fn=loss_fn, **options)
    callback.trainer = trainer
    trainer.remove_callback(HealingCallback)
    trainer.add_callback(callback)
    return callback


def _state_of(trainer: HfTrainer, counters: Counters) -> dict[str, Any]:
    """What the Healer of a Trainer saves and restores: name -> part, without absent parts."""
    model = trainer.accelerator.unwrap_model(trainer.model)
    known = {id(each) for each in model.parameters()}
    # Parameters of a loss, as in sentence-transformers, are in no module of the Trainer.
    others = [p for p in parameters(trainer.optimizer) if id(p) not in known]
    reference = None
    if getattr(trainer.args, "sync_ref_model", False):  # TRL then updates it during the training
        reference = trainer.ref_model
    parts = {
        "model": model,
        "optimizer": trainer.optimizer,
        "others": others or None,
        "scheduler": trainer.lr_scheduler,
        "scaler": getattr(trainer.accelerator, "scaler", None),
        "progress": counters,
        "reference": reference,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _folder(trainer: HfTrainer) -> Path:
    """The directory of the store "auto", and of the events of other stores."""
    return checkpoints.output_folder(trainer) / _FOLDER


def _save_now(trainer: HfTrainer) -> None:
    """Makes the Trainer save its own checkpoint after this step."""
    trainer.control.should_save = True


def _saved_argument(store: Any) -> Any:
    """The `store` argument in JSON; None for a store, which the Trainer cannot save."""
    if isinstance(store, list | tuple):
        saved = [_saved_argument(each) for each in store]
        if None in saved:
            return None
        return saved
    if isinstance(store, str | os.PathLike):
        return os.fspath(store)
    return None


# The import of this module replaces `Trainer.add_callback`.
wrap_train_when_added(HealingCallback)
