"""`HealingCallback` and `heal_trainer`: heal any transformers or TRL Trainer."""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple, Unpack

import torch
from torch.optim import Optimizer
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import TrainOutput

from healcore.console import warning
from healcore.core.decision import Cause, names_of
from healcore.core.errors import AttachError
from healcore.policy import Policy, PolicyLike, load
from healcore.policy.loader import can_apply_limit, with_limit
from healcore.runtime.data.random_states import isolated
from healcore.runtime.faults.classification import classify
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.run_options import LOGGING, TrainerOptions
from healcore.runtime.store.store import Places
from healcore.torch.attachment import Healing, attach, unwrapped
from healcore.torch.gradients import parameters
from healcore.torch.store import MemoryStore
from healcore.torch.trainers.hook import TrainerHook, newest_step, patched
from healcore.torch.trainers.huggingface.loop import HealedLoop
from healcore.torch.trainers.huggingface.steps import HealedSteps, HfTrainer, loss_fn_of, silent

_FOLDER = "_healcore"
"""Directory in the Trainer's `output_dir`. Uploads to the Hub skip a leading underscore."""


class TrainerCheckpoints(MemoryStore):
    """A store that holds nothing, for a run without rollbacks whose checkpoints the trainer saves.

    The Healer needs a store. In such a run it has nothing to restore, and the trainer's own
    checkpoints have the state of the policy.

    Args:
        save_now: called if the policy orders a checkpoint. Makes the trainer save.
    """

    def __init__(self, save_now: Callable[[], None]) -> None:
        super().__init__()
        self.trainer_save = save_now

    def replace_record(self, step: int, record: Mapping[str, Any]) -> None:
        """Does nothing, because the trainer's checkpoint has the state of the policy."""

    def nonfinite_in(
        self, state: Mapping[str, Any], names: Collection[str] | None = None
    ) -> tuple[str, ...]:
        """Returns an empty tuple without a check, which would copy the state."""
        return ()


class HealingCallback(TrainerHook, TrainerCallback, ExportableState):
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
        policy: as for `healcore.Healer`.
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
        policy: PolicyLike = "default",
        *,
        store: Places = None,
        loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
        **options: Unpack[TrainerOptions],
    ) -> None:
        TrainerHook.__init__(self, policy, options)
        self._store = store
        self._loss_fn = loss_fn
        self.trainer: HfTrainer = None
        self._loop: HealedLoop | None = None
        """The healed loop during `train()`, otherwise None."""

    @property
    def healing(self) -> Healing | None:
        """The handle of the optimizer, as `healcore.torch.attach` returns it.

        Use it to read the newest decision, or to announce a change of the training.

        Returns:
            The handle of the current or last `train()`, or None before the first.
        """
        return self.healings.get("optimizer")

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
        """Runs some steps without the optimizer, and returns what the policy would do.

        Each step is a forward and a backward pass of the trainer on the batches of one step, with
        the weights that it has now. The trainer does not change: weights, random states, files,
        `state` and callbacks.

        Args:
            steps: number of steps, at least 1.

        Raises:
            AttachError: this callback was not created by `heal_trainer`.
            ValueError: `steps` is not a whole number >= 1.
            Exception: an exception of the steps, with a diagnosis as its note.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is a whole number >= 1, not {steps!r}")
        trainer = self._known_trainer()
        observing: Any
        if isinstance(self._policy, Policy):
            observing = load(self._policy, mode="observe")
        else:
            observing = self._policy.config._replace(mode="observe")
        shared = trainer.accelerator.gradient_state.__dict__
        attributes, gradient_state = {**vars(trainer)}, {**shared}
        buffers = copy.deepcopy(dict(trainer.model.named_buffers()))
        for name, value in attributes.items():
            if isinstance(value, dict | deque):  # metrics of TRL, which a step adds to
                attributes[name] = copy.deepcopy(value)
        try:
            with isolated():
                return _steps_without_optimizer(trainer, steps, observing)
        except Exception as error:
            _add_hint(error)
            raise
        finally:
            vars(trainer).clear()
            vars(trainer).update(attributes)
            shared.clear()
            shared.update(gradient_state)
            for name, buffer in trainer.model.named_buffers():
                buffer.copy_(buffers[name])

    def _known_trainer(self) -> HfTrainer:
        if self.trainer is None:
            raise AttachError("the callback has no Trainer yet: use heal_trainer(trainer)")
        return self.trainer

    # -- the Trainer's checkpoints --------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The state of the policy, which the Trainer saves with its checkpoints.

        Returns:
            "args" -> nothing, because `train()` keeps this object when the Trainer restores its
            callbacks; "attributes" -> "engines" -> the state of the policy for each optimizer,
            empty before `train()`.
        """
        return {"args": {}, "attributes": {"engines": self._engines()}}

    def _resumed(self, trainer: HfTrainer, requested: Any) -> Any:
        """The argument `resume_from_checkpoint` of `train()`, or None if a store continues the run.

        A store that holds the run has precedence, because scripts pass the Trainer's newest
        checkpoint. A run without a store continues from the Trainer's checkpoint.
        """
        if not requested or self._store is None:
            return requested
        step = newest_step(self._place(trainer))
        if step is None:
            raise AttachError(
                f"resume_from_checkpoint={requested!r} conflicts with the store, which has no "
                "checkpoint and continues a run only by its own: omit the argument; to start a new "
                "run from those weights, load the model from that directory"
            )
        warning(
            f"resume_from_checkpoint={requested!r} is ignored, because the store continues the "
            f"run, from its checkpoint of step {step}: later steps of the Trainer's checkpoint are "
            "trained again. checkpoints=healcore.Checkpoints(every=...) saves more often"
        )
        return None

    # -- the Trainer's events -------------------------------------------------------------------

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Opens the Healer, and inserts it into the training loop.

        The Trainer calls this when model, optimizer and loss sums exist, before the first epoch.

        Raises:
            AttachError: the Trainer cannot be healed, or the callback was not given to a Trainer.
        """
        trainer, loader = self.trainer, kwargs.get("train_dataloader")
        if trainer is None or loader is None:
            raise AttachError(
                "HealingCallback belongs to no Trainer, or to one with a loop of its own: pass it "
                "to a transformers Trainer in callbacks=[...] or to trainer.add_callback; in a "
                "loop of your own heal the optimizer with healcore.torch.attach"
            )
        _check(trainer)
        if self._loop is not None:
            self.close(RuntimeError("the Trainer has begun its loop again"))
        policy, limit = self._policy, max(float(args.max_grad_norm or 0.0), 0.0) or None
        if can_apply_limit(policy):
            policy = with_limit(policy, limit)
            limit = None
        loop = HealedLoop(trainer, loader, self)
        self._open(policy, _state_of(trainer, loop), **self._places(trainer))
        healer = loop.healer = self.healer
        assert healer is not None
        self._loop = loop
        change = self._changes.enter_context
        if self._store is not None:
            loop.begin()
            run_epoch = functools.partial(loop.run_epoch, trainer._run_epoch)
            change(patched(trainer, "_run_epoch", run_epoch))
        elif state.global_step:
            for name, parameter in trainer.model.named_parameters():
                if not parameter.isfinite().all():
                    raise AttachError(
                        f"the Trainer's checkpoint of step {state.global_step} has NaN in {name}: "
                        "pass an older one as resume_from_checkpoint"
                    )
            # transformers 5.23 raises KeyError at the next save if the checkpoint lacked this.
            exported: Any = state.stateful_callbacks
            entry = exported.setdefault(type(self).__name__, {})
            engines = entry.get("attributes", {}).get("engines", {})
            self._adopt(engines, step=state.global_step)
        HealedSteps(trainer, healer, loop, self._changes)
        # The Trainer would clip before the step is judged: 700 would be judged as 1.0. Its argument
        # `max_grad_norm` stays, because every checkpoint saves it and trackers read it.
        change(patched(trainer, "_clip_grad_norm", trainer._get_grad_norm))
        if limit is not None:  # the policy does not clip: the Trainer's clip, after it has judged

            def clip(*_: Any) -> None:
                torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), limit)

            hook: Any = torch.compiler.disable(clip)
            handle = unwrapped(trainer.optimizer).register_step_pre_hook(hook)
            self._changes.callback(handle.remove)
        log = trainer.log

        @functools.wraps(log)
        def log_with_metrics(logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            # In `on_log` the trackers would have the row before this callback.
            if "loss" in logs or "train_loss" in logs:  # the row is of the training
                logs = {**logs, **self._new_metrics()}
            log(logs, *args, **kwargs)

        change(patched(trainer, "log", log_with_metrics))

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Does the Healer's work between two steps, or corrects `state.epoch`.

        With a store the Healer works when the Trainer asks for the next batch, where a rollback can
        leave the epoch. Without a store nothing is rolled back, and the Healer works here.
        """
        if self._loop is None or self.healer is None:
            return
        if self._store is None:
            self.healer.after_step()
        else:
            self._loop.correct_epoch()

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Reports the evaluation's loss to policies that read it.

        Does nothing outside of `train()`, and if the metrics have no `eval_loss`: with several
        evaluation data sets, the Trainer names each loss after its data set.
        """
        metrics = kwargs.get("metrics") or {}
        if self._loop is not None and self.healer is not None and "eval_loss" in metrics:
            self.healer.observe(eval_loss=metrics["eval_loss"])

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
        self._loop = None
        self._close(error)

    def _place(self, trainer: HfTrainer) -> Places:
        """The store, with the directory of "auto"."""
        return _folder(trainer) if self._store == "auto" else self._store

    def _places(self, trainer: HfTrainer) -> dict[str, Any]:
        """The options of the Healer about the store of one `train()`."""
        store: Any = self._place(trainer)
        loss_fn: Any = self._loss_fn
        if store is MemoryStore:  # of heal_trainer(store=None)
            store = MemoryStore()
        if loss_fn == "auto":
            loss_fn = loss_fn_of(trainer)
        options: dict[str, Any] = {"store": store, "loss_fn": loss_fn}
        if getattr(store, "root", store) is None:
            logging = self._options.get("logging", LOGGING)
            events = logging.events or _folder(trainer) / "healcore.events.jsonl"
            options["logging"] = dataclasses.replace(logging, events=events)
        if store is None:

            def save_now() -> None:
                trainer.control.should_save = True

            return {**options, "store": TrainerCheckpoints(save_now), "loss_fn": None}
        return options


class DryRun(NamedTuple):
    """The result of a dry run: what the policy saw, and what it would have done.

    Read `would` before a long run. A healthy start has an empty tuple for each step; a policy that
    skips the first steps does not fit the training.

    Attributes:
        losses: the loss of each step.
        grad_norms: the L2 norm of the gradients at each step, before clipping.
        finite: whether all losses and norms are finite. False if there was no batch.
        would: the names of the policy's causes and actions at each step, without clipping.
    """

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    finite: bool
    would: tuple[tuple[str, ...], ...]


class _NoStep(Optimizer):
    """An optimizer that measures its steps and changes nothing."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Does nothing."""


def _steps_without_optimizer(trainer: HfTrainer, steps: int, policy: Any) -> DryRun:
    """Runs forward and backward passes under a policy in observe mode."""
    trainer.log = silent
    trainer.state = copy.copy(trainer.state)
    args, model = trainer.args, trainer.model
    optimizer = _NoStep([p for p in model.parameters() if p.requires_grad], {})
    healing = attach(optimizer, policy, console=False)
    batches = iter(trainer.get_train_dataloader())
    losses: list[float] = []
    norms: list[float] = []
    would: list[tuple[str, ...]] = []
    for _ in range(steps):
        samples, items = trainer.get_batch_samples(
            batches, args.gradient_accumulation_steps, args.device
        )
        if not samples:
            break
        trainer.current_gradient_accumulation_steps = len(samples)
        loss: Any = 0.0
        for inputs in samples:
            with patched(trainer.accelerator, "scaler", None), trainer.accelerator.autocast():
                loss = loss + trainer.training_step(model, inputs, items)
        healing.observe(loss)
        optimizer.step()
        optimizer.zero_grad()
        decision: Any = healing.last_decision()
        losses.append(float(loss))
        norms.append(float(healing.metrics()["heal/grad_norm"]))
        would.append((*names_of(decision.cause), *names_of(decision.action)))
    finite = bool(losses) and all(map(math.isfinite, losses + norms))
    return DryRun(tuple(losses), tuple(norms), finite, tuple(would))


def _add_hint(error: Exception) -> None:
    """Adds a note to an exception of the training that says what to look at, if that is known."""
    fault = classify(error)
    hint = ""
    if fault.cause is not Cause.UNKNOWN:
        hint = fault.advice
    elif isinstance(error, KeyError):
        hint = "The batch lacks this key: compare the dataset's columns with the model's arguments."
    if hint:
        error.add_note(f"healcore: {hint}")


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


def _state_of(trainer: HfTrainer, loop: HealedLoop) -> dict[str, Any]:
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
        "progress": loop,
        "reference": reference,
    }
    return {name: part for name, part in parts.items() if part is not None}


def _folder(trainer: HfTrainer) -> Path:
    """The directory of the store "auto", and of the events of other stores."""
    return Path(trainer.args.output_dir or "trainer_output", _FOLDER)


def _check(trainer: HfTrainer) -> None:
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


def _with_healing(original: Callable[..., Any]) -> Callable[..., Any]:
    """`Trainer.train`, which gives each `HealingCallback` its Trainer and the end by an exception.

    The events of transformers pass the model, but not the Trainer, and there is no event for an
    exception, nor one before the Trainer loads its own checkpoint.
    """

    @functools.wraps(original)
    def train(
        trainer: HfTrainer, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        handler = trainer.callback_handler
        begin = handler.on_train_begin
        own = [each for each in handler.callbacks if isinstance(each, HealingCallback)]
        for callback in own:
            callback.trainer = trainer
            resume_from_checkpoint = callback._resumed(trainer, resume_from_checkpoint)

        def begin_with_own(*event: Any) -> Any:
            """Begins with the user's objects, which the Trainer may have replaced by copies.

            Other callbacks may change the initial state, so they begin first. In later events they
            come last, and read the corrected `state.epoch`.
            """
            others = [each for each in handler.callbacks if not isinstance(each, HealingCallback)]
            handler.callbacks[:] = others + own
            control = begin(*event)
            handler.callbacks[:] = own + others
            return control

        try:
            with patched(handler, "on_train_begin", begin_with_own):
                return original(trainer, resume_from_checkpoint, *args, **kwargs)
        except BaseException as error:
            for callback in own:
                callback.close(error)
            raise

    return train


# The import of this module replaces `Trainer.train`.
Trainer.train = _with_healing(Trainer.train)  # pyright: ignore[reportAttributeAccessIssue]
