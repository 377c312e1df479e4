"""Defines `heal(trainer)`, which rolls back inside a running `Trainer.train()`."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Literal, Unpack

from healcore.console import Console
from healcore.core.engine import Engine
from healcore.policy import Overrides, Policy, PolicyLike, load
from healcore.policy.loader import resolve
from healcore.policy.trainer_limit import keeps_limit, with_limit
from healcore.runtime.healer import Healer
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.incidents.hooks import EventHook, Hook
from healcore.runtime.recovery.journal import NAME
from healcore.runtime.store import CheckpointStore, Keep
from healcore.torch.attachment import unwrapped
from healcore.torch.errors import AttachError
from healcore.torch.trainers import replaced
from healcore.torch.trainers.huggingface import signals
from healcore.torch.trainers.huggingface.callback import HealingCallback
from healcore.torch.trainers.huggingface.dry_run import DryRun, add_hint, copy_of, findings
from healcore.torch.trainers.huggingface.epochs import EpochFeed, EpochFraction, run_epochs
from healcore.torch.trainers.huggingface.out_of_memory import SplitSteps
from healcore.torch.trainers.huggingface.progress import Progress

if TYPE_CHECKING:
    from transformers import Trainer
    from transformers.trainer_utils import TrainOutput

_METHODS = ("_prepare_for_training", "_run_epoch", "_evaluate")
"""Methods of the Trainer that are replaced while it trains. They are private and may change."""

Store = str | os.PathLike[str] | CheckpointStore | None


def heal(
    trainer: Trainer,
    policy: PolicyLike = "default",
    *,
    store: Store | Literal["auto"] = "auto",
    events: str | os.PathLike[str] | None = None,
    metrics: str | os.PathLike[str] | None = "auto",
    save_every: int | None = None,
    keep: Keep | None = None,
    loss_fn: Callable[[Any], Any] | Literal["auto"] | None = "auto",
    on_incident: Hook | Iterable[Hook] = (),
    on_saved: EventHook | Iterable[EventHook] = (),
    on_rollback: EventHook | Iterable[EventHook] = (),
    rerun: bool = False,
    resume: bool | Literal["auto"] = "auto",
    nonfinite_ok: Iterable[str] = (),
    attach: Mapping[str, Any] | None = None,
    trust: bool = False,
    trackers: object = (),
    stop_file: str | os.PathLike[str] | None = None,
    console: Console = "auto",
    **overrides: Unpack[Overrides],
) -> SelfHealingTrainer:
    """Heals a `transformers.Trainer`, or a trainer of TRL, while it trains.

        healed = heal(trainer, "default")
        healed.train()

    From then on `trainer.train()` is healed too. To train it unhealed, build another Trainer.

    Every step is judged by its loss and its gradient norm, then clipped or skipped. When the model
    is damaged, weights, optimizer, learning-rate schedule, random states, data and Trainer's own
    counters go back together to a known-good checkpoint, within the same call of `train()`.

    The policy clips, and has to see the norm before clipping: `max_grad_norm` of the
    TrainingArguments becomes the `max_norm` of the policy's clipping where that is higher.
    Under "default" it then clips alone, as without healcore.

    Args:
        trainer: the Trainer, built as usual.
        policy: as for `healcore.Healer`.
        store: a directory for checkpoints, a store, or None: host memory only, which is lost with
            the process. "auto": `_healcore` in the trainer's `output_dir`. Started again with the
            same store, the program continues.
        events: the events file; None: `healcore.events.jsonl` in the store.
        metrics: a file with one line per step; "auto": next to the events; None: no file.
        save_every: steps between two checkpoints; None: as for `healcore.Healer`. In any case the
            newest state is saved for a restart as often as the trainer saves (`save_steps`).
        keep: how many checkpoints of each kind stay.
        loss_fn: the loss of one batch, by which the current weights are compared with earlier ones.
            "auto": the trainer's own `compute_loss`, except where the trainer generates what it is
            trained on (GRPO, RLOO). None: without that evidence.
        on_incident: functions that receive an incident and may override what is done.
        on_saved: as for `healcore.Healer`.
        on_rollback: as for `healcore.Healer`.
        rerun: go back once with nothing changed before a rollback.
        resume: "auto" and True continue an interrupted run, and do not train one again that has
            completed; with other arguments than that run had, "auto" raises StoreNotEmpty instead.
            False refuses a store that is not empty.
        nonfinite_ok: patterns of array names in which NaN and Inf are allowed.
        attach: options of `healcore.torch.attach`.
        trust: pickle and unpickle what has no plain form, as for `healcore.Healer`.
        trackers: as for `healcore.Healer`; besides those of the trainer's `report_to`.
        stop_file: as for `healcore.Healer`.
        console: whether lines are printed to standard error, as for `healcore.Healer`.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`.

    Returns:
        The trainer with healing; everything but `train` is the trainer's own.

    Raises:
        AttachError: it is no Trainer, or it is set up in a way that cannot be healed.
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
    """
    options: dict[str, Any] = {
        "events": events,
        "metrics": metrics,
        "save_every": save_every,
        "keep": keep,
        "on_incident": on_incident,
        "on_saved": on_saved,
        "on_rollback": on_rollback,
        "rerun": rerun,
        "resume": resume,
        "nonfinite_ok": nonfinite_ok,
        "attach": attach,
        "trust": trust,
        "trackers": trackers,
        "stop_file": stop_file,
        "console": console,
    }
    return SelfHealingTrainer(
        trainer, resolve(policy, overrides), store=store, loss_fn=loss_fn, options=options
    )


class SelfHealingTrainer:
    """A trainer that goes back by itself. Created by `heal`.

    `train` of this one trainer object is replaced. While it trains, other methods are replaced too;
    afterwards, whatever happens, they are as before. Methods of a subclass of the user's are called
    as always.

    Attributes:
        trainer: the trainer that was given.
        healer: of the running or the last `train()`; None before the first.
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
        if keeps_limit(policy):
            policy, self._limit = with_limit(policy, self._limit), None
        self.healer: Healer[Any] | None = None
        if store == "auto":
            # Trainer.push_to_hub leaves out what begins with an underscore.
            store = os.path.join(trainer.args.output_dir or "trainer_output", "_healcore")
        self._loss_fn = signals.loss_fn_of(trainer) if loss_fn == "auto" else loss_fn
        self._options = {**options, "policy": policy, "store": store, "loss_fn": self._loss_fn}
        self._split: SplitSteps | None = None
        Healer(state={}, **self._options)  # raises at once if an option or the policy is invalid
        self._own_train = _heal_train(trainer, self)

    def __getattr__(self, name: str) -> Any:
        """Everything else is the trainer's own."""
        if name == "trainer":  # not set: __init__ has raised
            raise AttributeError(name)
        return getattr(self.trainer, name)

    def train(
        self,
        resume_from_checkpoint: bool | None = None,
        *,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> TrainOutput:
        """Trains as `Trainer.train` does, and returns what it returns.

        Args:
            resume_from_checkpoint: True or None. Both continue from the store, if there is
                something in it.
            ignore_keys_for_eval: as for `Trainer.train`.

        Raises:
            AttachError: another checkpoint is named, or only the Trainer has saved some: only the
                store can be resumed from.
            RunStopped: the policy ends the run, with a diagnosis; a SystemExit of status 1.
        """
        if resume_from_checkpoint not in (None, True, False):
            raise AttachError(
                f"resume_from_checkpoint={resume_from_checkpoint!r} with heal(): only one of the "
                "two can own the position of the run. Leave it out: the run continues from the "
                f"store, {self._options['store']}; to begin a new run from those weights, load the "
                "model from that directory and pass an empty store"
            )
        if resume_from_checkpoint:
            self._refuse_other_checkpoints()
        _check(self.trainer)
        with ExitStack() as stack:
            _Run(self, stack).replace_methods()
            return self._own_train(ignore_keys_for_eval=ignore_keys_for_eval)

    def report(self) -> HealingReport:
        """What has happened so far: incidents, rollbacks, learning rate, how it ended.

        Raises:
            AttachError: `train()` has not begun yet.
        """
        if self.healer is None:
            raise AttachError("there is nothing to report before train(): call it first")
        return self.healer.report()

    def dry_run(self, steps: int = 2) -> DryRun:
        """Trains a copy for some steps in observe mode, and says what was found.

        The trainer is untouched: weights, optimizer, random states, disk, `state` and callbacks.
        It takes the memory of a second model.

        Args:
            steps: optimizer steps, at least 1.

        Raises:
            ValueError: `steps` is no whole number >= 1.
            Exception: what the training raises, with a note about what to look at.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ValueError(f"steps is a whole number >= 1, not {steps!r}")
        policy = self._options["policy"]
        if isinstance(policy, Policy):
            policy = load(policy, mode="observe")
        else:
            policy = policy.config._replace(mode="observe")
        with copy_of(self.trainer, steps) as (trainer, folder):
            metrics = folder / "metrics.jsonl"
            options = {"metrics": metrics, "attach": self._options["attach"]}
            try:
                heal(trainer, policy, store=None, loss_fn=None, **options).train()
            except Exception as error:
                add_hint(error)
                raise
            return findings(metrics)

    def _refuse_other_checkpoints(self) -> None:
        """Raises AttachError if True could only mean the checkpoints of a run without healing."""
        from transformers.trainer_utils import get_last_checkpoint

        store, folder = self._options["store"], self.trainer.args.output_dir
        if not isinstance(store, str | os.PathLike) or os.path.exists(os.path.join(store, NAME)):
            return
        found = get_last_checkpoint(folder) if folder and os.path.isdir(folder) else None
        if found is not None:
            raise AttachError(
                f"resume_from_checkpoint=True with heal() continues from the store, {store}, where "
                f"no run has begun yet, and not from {found}, which the Trainer has saved. Leave "
                "it out to train from step 0, load the model from that directory to begin with "
                "its weights, or finish that run without heal()"
            )

    def _open(self, state: dict[str, Any], stack: ExitStack) -> Healer[Any]:
        args = self.trainer.args
        every = self.trainer.state.save_steps if args.save_strategy == "steps" else None
        self.healer = stack.enter_context(Healer(state=state, restart_every=every, **self._options))
        return self.healer


class _Run:
    """One call of `train()`: what is replaced on the trainer, until `stack` is closed."""

    def __init__(self, healed: SelfHealingTrainer, stack: ExitStack) -> None:
        self._healed = healed
        self._trainer = healed.trainer
        self._stack = stack
        self._feed: EpochFeed | None = None
        self._progress: Progress | None = None

    def replace_methods(self) -> None:
        """Replaces what `train()` calls, until the stack is closed."""
        trainer, stack = self._trainer, self._stack
        for name in _METHODS:
            self._replace(name, getattr(self, f"on_{name}"))
        healed = self._healed
        healed._split = SplitSteps(trainer, self._healer, stack)
        self._replace("training_step", healed._split.training_step)
        self._replace("_push_from_checkpoint", self._repeating)
        stack.enter_context(signals.unclipped(trainer))
        stack.enter_context(signals.extended_log(trainer, self._metrics))

    def _replace(self, name: str, replacement: Callable[..., Any]) -> None:
        """Lets `replacement` be called with the trainer's own method before the arguments."""
        call = functools.partial(replacement, getattr(self._trainer, name))
        self._stack.enter_context(replaced(self._trainer, name, call))

    def on__prepare_for_training(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Opens the Healer: the optimizer exists from here on, and nothing has been trained."""
        trainer, healed = self._trainer, self._healed
        assert healed._split is not None
        model, loader = own(*args, **kwargs)
        self._feed = EpochFeed(loader)
        self._progress = Progress(trainer, self._feed, healed._split)
        state = {
            "model": trainer.accelerator.unwrap_model(trainer.model),
            "optimizer": trainer.optimizer,
            "scheduler": trainer.lr_scheduler,
            "scaler": getattr(trainer.accelerator, "scaler", None),
            "progress": self._progress,
        }
        state = {name: each for name, each in state.items() if each is not None}
        healer = healed._open(state, self._stack)
        same = self._progress.max_steps == trainer.state.max_steps
        self._feed.open(healer, nothing_to_do=healer.had_completed and same)
        if healed._limit is not None:  # the policy's clipping does not hold it
            clipped = signals.clipped_after(trainer, unwrapped(trainer.optimizer), healed._limit)
            self._stack.enter_context(clipped)
        callbacks = trainer.callback_handler.callbacks
        fraction = EpochFraction(self._feed)
        callbacks.insert(0, fraction)
        self._stack.callback(callbacks.remove, fraction)
        return model, loader

    def on__run_epoch(self, own: Any, **call: Any) -> None:
        """Runs the epoch, again from an earlier batch after a rollback."""
        assert self._feed is not None
        assert self._progress is not None
        self._progress.training = True
        run_epochs(self._trainer, self._feed, own, call)

    def _healer(self) -> Healer[Any]:
        assert self._healed.healer is not None
        return self._healed.healer

    def _metrics(self) -> dict[str, float]:
        healer = self._healed.healer
        return {} if healer is None else healer.metrics()

    def _repeating(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """A push of a checkpoint to the Hub, again after a failure of the network."""
        return self._healer().retrying(own)(*args, **kwargs)

    def on__evaluate(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Reports the loss of an evaluation."""
        metrics = own(*args, **kwargs)
        healer = self._healed.healer
        if healer is not None and "eval_loss" in metrics:
            healer.observe_eval(metrics["eval_loss"])
        return metrics


def _heal_train(trainer: Any, healed: SelfHealingTrainer) -> Callable[..., Any]:
    """Makes the trainer's own `train` heal, for `heal(trainer); trainer.train()`; returns it."""
    own = trainer.train
    if hasattr(own, "__healed__"):  # by an earlier heal(), under another policy
        own = own.__wrapped__

    @functools.wraps(own)
    def train(*args: Any, trial: Any = None, **kwargs: Any) -> Any:
        if trial is not None or len(args) > 1:
            raise AttachError(
                "hyperparameter_search with heal(): the trials would share one store and one "
                "history; search with a Trainer that has HealingCallback among its callbacks"
            )
        return healed.train(*args, **kwargs)

    train.__healed__ = healed  # type: ignore[attr-defined]
    trainer.train = train
    return own


def _check(trainer: Any) -> None:
    from transformers import Trainer, __version__

    if isinstance(trainer, SelfHealingTrainer):
        raise AttachError(
            "heal takes a trainer that is not healed yet, and this is what heal() has returned: "
            "call its train(), or pass its .trainer to heal it under another policy"
        )
    if not isinstance(trainer, Trainer):
        raise AttachError(
            f"heal takes a transformers.Trainer or a trainer of TRL, not {type(trainer).__name__}: "
            "for a loop of your own use healcore.Healer"
        )
    if any(not hasattr(Trainer, name) for name in _METHODS):
        raise AttachError(
            f"heal needs transformers 5.3 or later, and this is {__version__}: upgrade it, or use "
            "HealingCallback, which needs less of it and does not go back"
        )
    if any(isinstance(each, HealingCallback) for each in trainer.callback_handler.callbacks):
        raise AttachError(
            "one policy heals a trainer, and this one has a HealingCallback among its callbacks, "
            "which would judge the same steps as heal(): leave the callback out, or write "
            "trainer.remove_callback(HealingCallback) before"
        )
    if trainer.args.auto_find_batch_size:
        raise AttachError(
            "auto_find_batch_size=True begins the training again when memory runs out, and changes "
            "the batch size: set it to False; heal() splits the batch and keeps its size"
        )
