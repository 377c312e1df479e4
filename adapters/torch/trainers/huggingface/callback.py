"""Defines `HealingCallback`, a callback that heals any transformers or TRL Trainer."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, Unpack

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.trainer_callback import ExportableState

from healcore.console import Console, checked, warning
from healcore.core.engine import StateError
from healcore.core.step_record import StepRecord
from healcore.core.verdict import Action, Cause
from healcore.policy import Overrides, Policy, PolicySource, from_dict, load, to_dict
from healcore.policy.trainer_limit import can_apply_limit, with_limit
from healcore.runtime.faults.failures import failures_of
from healcore.runtime.incidents.step_lines import cause_text
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.store.ranks import Alone, on_first
from healcore.torch.attachment import attach, unwrapped
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.store.gloo import GlooRanks, initialized
from healcore.torch.trainers.huggingface import checkpoints, signals


class HealingCallback(TrainerCallback, ExportableState):
    """Clips gradients, skips bad steps, and prevents a resume from a bad checkpoint.

        trainer = Trainer(..., callbacks=[HealingCallback("default")])

    The policy judges the unrounded loss of each optimizer step and its gradient norm before
    clipping. The Trainer's own `max_grad_norm` stays in force: the lower limit applies.

    A callback cannot roll back: use `heal_trainer`. If the policy orders a stop, `train()` raises
    `RunStopped`, a SystemExit: the process ends with status 1.

    Args:
        policy: a preset's name, the path of a TOML file, a `Policy`, or a mapping as in a
            checkpoint's trainer_state.json.
        engine: see `healcore.torch.attach`.
        console: whether lines are printed to standard error, as for `healcore.torch.attach`.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`.

    Attributes:
        healing: the optimizer's handle in the current or last `train()`, or None before the first.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """

    def __init__(
        self,
        policy: PolicySource | Mapping[str, Any] = "default",
        *,
        engine: Literal["auto", "host", "device"] = "auto",
        console: Console = "auto",
        **overrides: Unpack[Overrides],
    ) -> None:
        if isinstance(policy, Mapping):
            policy = from_dict(policy)
        self.policy: Policy = load(policy, **overrides)
        self.healing: Healing | None = None
        self._engine: Literal["auto", "host", "device"] = engine
        self._console: Console = checked(console)
        self._changes = ExitStack()
        """Restores the Trainer and its optimizer."""
        self._orders, self._cause = Action(0), Cause(0)
        """Orders that the Trainer has not received, and their causes."""

    def state(self) -> dict[str, Any]:
        """Returns the arguments and the state of this object, which the Trainer saves."""
        return {
            "args": {
                "policy": to_dict(self.policy),
                "engine": self._engine,
                "console": self._console,
            },
            "attributes": {"saved": None if self.healing is None else self.healing.state_dict()},
        }

    def on_init_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Wraps the Trainer's `train()`."""
        trainer = _trainer_of(self)
        if trainer is not None:
            _wrap_train(trainer)

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Attaches the policy. The Trainer calls this after it has restored its own state."""
        self.close()  # auto_find_batch_size restarted the training, or an unwrapped train() raised
        trainer = _trainer_of(self)
        if trainer is None:
            raise AttachError(
                "HealingCallback found no Trainer among its callers: give it to a transformers "
                "Trainer in callbacks=[...], or heal the optimizer with healcore.torch.attach"
            )
        _check(trainer)
        _wrap_train(trainer)
        saved = _saved_state(state, type(self).__name__)
        limit = signals.max_grad_norm(trainer)
        policy: Any = self.policy
        with ExitStack() as stack:
            if can_apply_limit(policy):
                policy, limit = with_limit(policy, limit), None
            healing = attach(trainer.optimizer, policy, engine=self._engine, console=self._console)
            stack.callback(healing.detach)
            stack.enter_context(signals.unclipped(trainer))
            if limit is not None:
                optimizer = unwrapped(trainer.optimizer)
                stack.enter_context(signals.clipped_after(trainer, optimizer, limit))
            stack.enter_context(signals.observed_losses(trainer, healing.observe))
            metrics = functools.partial(signals.metrics_of, healing)
            stack.enter_context(signals.extended_log(trainer, metrics))
            healing.hooks.incident_log.take = self._take
            self._changes = stack.pop_all()
        self.healing = healing
        if state.global_step:
            _load(healing, saved, state.global_step)
        # transformers 5.23 raises KeyError at the next save if the checkpoint lacked this entry.
        exported: Any = state.stateful_callbacks
        exported.setdefault(type(self).__name__, self.state())

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Saves or stops by the policy's orders."""
        orders, self._orders = self._orders, Action(0)
        control.should_save |= bool(orders & Action.SAVE)
        if orders & Action.STOP:
            cause = cause_text(self._cause)
            advice = " ".join(row.diagnosis for row in failures_of(self._cause))
            raise RunStopped(
                f"healcore stops the run at step {state.global_step}: {cause}. {advice} Resume "
                "from an earlier checkpoint, or use healcore.torch.heal_trainer, which rolls back",
                cause,
                None,
            )

    def on_evaluate(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Reports the evaluation's loss to policies that read it."""
        metrics = kwargs.get("metrics")
        loss = metrics.get("eval_loss") if isinstance(metrics, dict) else None
        if self.healing is not None and loss is not None:
            self.healing.observe_eval(loss)

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Restores the Trainer."""
        self.close()

    def close(self) -> None:
        """Restores the Trainer and its optimizer. A second call does nothing."""
        self._changes.close()
        self._orders, self._cause = Action(0), Cause(0)

    def _take(self, record: StepRecord, action: Action) -> Action:
        """Keeps the orders of one step. Returns the orders that are not carried out."""
        self._orders |= action
        self._cause |= Cause(record.cause)
        return action & ~Action.STOP


def _check(trainer: Any) -> None:
    """Raises AttachError for a Trainer whose optimizer steps a policy cannot judge."""
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind == "DEEPSPEED":
        raise AttachError(
            "HealingCallback does not support a Trainer with DeepSpeed, whose engine clips, skips "
            "and steps by itself: use healcore.torch.heal_engine in a loop of your own, or train "
            "without DeepSpeed"
        )
    if kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        raise AttachError(
            "HealingCallback does not support FSDP 1, where a rank has only the norm of its shard: "
            'use FSDP 2, TrainingArguments(fsdp_config={"fsdp_version": 2})'
        )


def _saved_state(state: State, name: str) -> Any:
    """The callback's state in the checkpoint that the Trainer resumed from, or None.

    The attribute `saved` cannot be used: the Trainer sets it only with the option
    `restore_callback_states_from_checkpoint`, and on a new object that a later `train()` may reuse.
    """
    exported: Any = state.stateful_callbacks
    entry = exported.get(name)
    entry = entry[0] if isinstance(entry, list) else entry
    return None if entry is None else entry.get("attributes", {}).get("saved")


def _load(healing: Healing, saved: Any, step: int) -> None:
    """Loads a saved state. Without a usable state, warns and keeps the initial baselines."""
    problem = "it has none"
    if saved is not None:
        try:
            healing.load_state_dict(saved)
        except StateError as error:
            problem = str(error)
        else:
            return
    warning(
        f"the policy's state in the checkpoint of step {step} was not loaded, so baselines, "
        f"budgets and the learning-rate multiplier are reset: {problem}"
    )


def _trainer_of(callback: HealingCallback) -> Any | None:
    """The Trainer among the callers, or None. Callbacks do not receive it as an argument."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None)
        if any(other is callback for other in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back
    return None


def _wrap_train(trainer: Any) -> None:
    """Makes `trainer.train()` resume from a complete checkpoint, and clean up when it raises.

    The Trainer has no callback event for these two moments.
    """
    if "train" in vars(trainer):
        return
    original = trainer.train

    @functools.wraps(original)
    def train(resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        if resume_from_checkpoint:
            resume_from_checkpoint = _resume_checkpoint(trainer, resume_from_checkpoint)
        try:
            return original(resume_from_checkpoint, *args, **kwargs)
        except BaseException:
            for callback in trainer.callback_handler.callbacks:  # a resume may have replaced it
                if isinstance(callback, HealingCallback):
                    callback.close()
            raise

    trainer.train = train


def _resume_checkpoint(trainer: Any, requested: Any) -> Any:
    """The checkpoint to resume from: `requested`, or an older checkpoint if that is bad."""
    found = checkpoints.list_checkpoints(Path(trainer.args.output_dir))
    if requested is not True:
        names = [path.absolute() for path in found]
        if Path(requested).absolute() not in names:
            return requested
        found = found[: names.index(Path(requested).absolute()) + 1]
    ranks = GlooRanks() if initialized() else Alone()
    target, defects = on_first(ranks, lambda: checkpoints.newest_complete(found))
    for path, defect in defects.items():
        warning(f"the run does not resume from {path}: {defect}")
    if target is None and defects:
        warning(f"{trainer.args.output_dir} has no good checkpoint: training starts at step 0")
        return None
    return requested if target is None else str(target)
