"""Defines `HealingCallback`, a callback that heals any transformers or TRL Trainer."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack

from transformers import TrainerCallback
from transformers import TrainerControl as Control
from transformers import TrainerState as State
from transformers import TrainingArguments as Args
from transformers.trainer_callback import ExportableState

from healcore.console import Console, checked, warning
from healcore.policy import Overrides, Policy, PolicySource, from_dict, load, to_dict
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.incidents.hooks import Hook, Hooks
from healcore.runtime.store.ranks import Alone, on_first
from healcore.torch.errors import AttachError
from healcore.torch.healing import Healing
from healcore.torch.store.gloo import GlooRanks, initialized
from healcore.torch.trainers.huggingface import checkpoints
from healcore.torch.trainers.huggingface.run import TrainingRun


class HealingCallback(TrainerCallback, ExportableState):
    """Clips gradients, skips bad steps, and prevents a resume from a bad checkpoint.

        trainer = Trainer(..., callbacks=[HealingCallback("default")])

    The policy judges the unrounded loss of each optimizer step and its gradient norm before
    clipping. The Trainer's own `max_grad_norm` stays in force: the lower limit applies.

    A callback cannot roll back within `train()`. If the policy orders a rollback, a message says so
    once, and the checkpoints that were saved since the incident began are moved away. If a budget
    of the policy is exhausted while the model gets worse, the run stops with a diagnosis
    (`RunStopped`, a SystemExit: the process ends with status 1).

    Args:
        policy: a preset's name, the path of a TOML file, a `Policy`, or a mapping as in a
            checkpoint's trainer_state.json.
        events: path of the events file, or None for no file. A postmortem is written next to the
            events file. "auto" is `_healcore/healcore.events.jsonl` in output_dir.
        engine: see `healcore.torch.attach`.
        on_incident: functions that receive an incident and may override the response; see
            `healcore.Healer`. Checkpoints do not contain these functions.
        console: whether lines are printed to standard error, as for `healcore.Healer`.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`.

    Raises:
        healcore.policy.PolicyError: the policy does not exist or is invalid.
    """

    def __init__(
        self,
        policy: PolicySource | Mapping[str, Any] = "default",
        *,
        events: str | os.PathLike[str] | Literal["auto"] | None = "auto",
        engine: Literal["auto", "host", "device"] = "auto",
        on_incident: Hook | Iterable[Hook] = (),
        console: Console = "auto",
        **overrides: Unpack[Overrides],
    ) -> None:
        if isinstance(policy, Mapping):
            policy = from_dict(policy)
        self.policy: Policy = load(policy, **overrides)
        self._events, self._engine = events, engine
        self._hooks = Hooks(on_incident)
        self._console: Console = checked(console)
        self._run: TrainingRun | None = None
        self._last_report: HealingReport | None = None

    @property
    def healing(self) -> Healing | None:
        """The optimizer's handle during `train()`, else None."""
        return None if self._run is None else self._run.driver.healings["optimizer"]

    def report(self) -> HealingReport | None:
        """The report of the current or last `train()`, or None before the first."""
        return self._last_report if self._run is None else self._run.report()

    def state(self) -> dict[str, Any]:
        """Returns the arguments and the state of this object, which the Trainer saves."""
        return {
            "args": {
                "policy": to_dict(self.policy),
                "events": None if self._events is None else os.fspath(self._events),
                "engine": self._engine,
                "console": self._console,
            },
            "attributes": {"saved": None if self._run is None else self._run.state_dict()},
        }

    def on_init_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Wraps the Trainer's `train()`."""
        trainer = _trainer_of(self)
        if trainer is not None:
            _wrap_train(trainer)

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Attaches the policy. The Trainer calls this after it has restored its own state."""
        # auto_find_batch_size restarted the training, or a train() that is not wrapped raised.
        if self._run is not None:
            self.close(RuntimeError("train() was started again"))
        trainer = _trainer_of(self)
        if trainer is None:
            raise AttachError(
                "HealingCallback found no Trainer among its callers: give it to a transformers "
                "Trainer in callbacks=[...], or heal the optimizer with healcore.torch.attach"
            )
        _wrap_train(trainer)
        saved = _saved_state(state, type(self).__name__)
        # transformers 5.23 raises KeyError at the next save if the checkpoint lacked this entry.
        exported: Any = state.stateful_callbacks
        exported.setdefault(type(self).__name__, self.state())
        self._run = TrainingRun(
            trainer,
            self.policy,
            events=self._events,
            engine=self._engine,
            hooks=self._hooks,
            console=self._console,
        )
        self._run.start(saved)

    def on_step_end(self, args: Args, state: State, control: Control, **kwargs: object) -> Control:
        """Reads the decisions, and executes the orders that a callback can execute."""
        run = self._run
        if run is None:
            return control
        wait = control.should_save or control.should_training_stop or control.should_log
        run.after_step(state.global_step, wait=wait)
        control.should_save |= run.take_save_request()
        return self._prevent_bad_save(control)

    def on_epoch_end(self, args: Args, state: State, control: Control, **kwargs: object) -> Control:
        """Checks the state before it is saved at the end of an epoch."""
        return self._prevent_bad_save(control)

    def on_evaluate(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Reports the evaluation's loss to policies that read it."""
        metrics = kwargs.get("metrics")
        loss = metrics.get("eval_loss") if isinstance(metrics, dict) else None
        if self._run is not None and loss is not None:
            self._run.driver.observe_eval(loss)

    def on_save(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Records the checkpoint that the Trainer has written."""
        if self._run is not None:
            self._run.record_save()

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Ends the run; see `close`."""
        if self._run is not None:
            self._run.read_remaining()
        self.close(None)

    def setup(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: only Lightning calls this hook."""
        raise TypeError(
            "HealingCallback is for a transformers or TRL Trainer, and Lightning has called it: "
            "write callbacks=[healcore.torch.LightningHealingCallback(policy)]"
        )

    # Lightning reads `state_key` before it calls `setup`, and calls `on_exception` after it.
    on_exception = setup
    state_key = "HealingCallback"

    def close(self, error: BaseException | None) -> None:
        """Ends the current run, if any. `error` is the exception that `train()` raised, or None."""
        run, self._run = self._run, None
        if run is not None:
            run.close(error)
            self._last_report = run.report()

    def _prevent_bad_save(self, control: Control) -> Control:
        if self._run is not None and control.should_save:
            control.should_save = self._run.may_save()
        return control


def _saved_state(state: State, name: str) -> Any:
    """The callback's state in the checkpoint that the Trainer resumed from, or None.

    The attribute `saved` cannot be used: the Trainer sets it only with the option
    `restore_callback_states_from_checkpoint`, and on a new object that a later `train()` may reuse.
    """
    exported: Any = state.stateful_callbacks
    entry = exported.get(name)
    entry = entry[0] if isinstance(entry, list) else entry
    return None if entry is None else entry.get("attributes", {}).get("saved")


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
    """Makes `trainer.train()` resume from a good checkpoint, and clean up when it raises.

    The Trainer has no callback event for these two moments. Raises AttachError, before any change,
    if several policies would judge the same steps.
    """
    callbacks = _healing_callbacks(trainer)
    if len(callbacks) > 1:
        policies = ", ".join(repr(callback.policy.name) for callback in callbacks)
        raise AttachError(
            f"a Trainer takes one HealingCallback, and this one has {len(callbacks)} (policies "
            f"{policies}): pass only one in callbacks=[...]; "
            "trainer.remove_callback(HealingCallback) removes one"
        )
    if "train" in vars(trainer):
        return
    original = trainer.train

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_resume_checkpoint(trainer, args[0]), *args[1:])
        elif "resume_from_checkpoint" in kwargs:
            requested = kwargs["resume_from_checkpoint"]
            checkpoint = _resume_checkpoint(trainer, requested)
            kwargs = {**kwargs, "resume_from_checkpoint": checkpoint}
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            for callback in _healing_callbacks(trainer):
                callback.close(error)
            raise

    trainer.train = train


def _healing_callbacks(trainer: Any) -> list[HealingCallback]:
    """A Trainer's current HealingCallbacks. A resume may replace them by new objects."""
    callbacks = trainer.callback_handler.callbacks
    return [callback for callback in callbacks if isinstance(callback, HealingCallback)]


def _resume_checkpoint(trainer: Any, requested: Any) -> Any:
    """The checkpoint to resume from: `requested`, or another checkpoint if that is bad.

    Moves newer checkpoints that are bad or incomplete (killed during the save), because the Trainer
    would resume from the newest. Only checkpoints in `output_dir` are moved.
    """
    folder = Path(trainer.args.output_dir)
    observes = all(callback.policy.mode == "observe" for callback in _healing_callbacks(trainer))
    if not requested or observes:
        return requested
    if requested is not True and Path(requested).absolute().parent != folder.absolute():
        return requested
    # Called on every rank: the state dict of a sharded model may need collectives.
    nonfinite_ok = checkpoints.nonfinite_tensors(trainer.accelerator.unwrap_model(trainer.model))
    ranks = GlooRanks() if initialized() else Alone()
    target, defects = on_first(ranks, lambda: checkpoints.resume_target(folder, nonfinite_ok))
    bad_names = {path.name for path in defects}
    if requested is not True and Path(requested).name not in bad_names and Path(requested).is_dir():
        return requested
    if trainer.args.should_save:
        for path, defect in defects.items():
            new = checkpoints.move_to_quarantine(path, defect)
            older = "" if target is None else f"; the run resumes from {target.name}"
            warning(f"{path} is not a checkpoint to resume from ({defect}): moved to {new}{older}")
    trainer.accelerator.wait_for_everyone()
    if target is None:
        if defects:
            warning(f"{folder} has no good checkpoint: training starts at step 0")
            return None
        return requested
    return str(target)
