"""Defines `HealingCallback`: in `callbacks=[...]` it heals any transformers or TRL Trainer."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn, Unpack

from healcore.console import Console, checked, warning
from healcore.extras import require

require("huggingface", "transformers", "accelerate")

from transformers import TrainerCallback  # noqa: E402
from transformers import TrainerControl as Control  # noqa: E402
from transformers import TrainerState as State  # noqa: E402
from transformers import TrainingArguments as Args  # noqa: E402
from transformers.trainer_callback import ExportableState  # noqa: E402

from healcore.policy import Overrides, Policy, PolicySource, from_dict, load, to_dict  # noqa: E402
from healcore.runtime.healing_report import HealingReport  # noqa: E402
from healcore.runtime.incidents.hooks import Hook, Hooks  # noqa: E402
from healcore.runtime.store.ranks import Alone, on_first  # noqa: E402
from healcore.torch.errors import AttachError  # noqa: E402
from healcore.torch.healing import Healing  # noqa: E402
from healcore.torch.store.gloo import GlooRanks, initialized  # noqa: E402
from healcore.torch.trainers.huggingface import checkpoints  # noqa: E402
from healcore.torch.trainers.huggingface.run import TrainingRun  # noqa: E402


class HealingCallback(TrainerCallback, ExportableState):
    """Clips, skips, and keeps bad checkpoints from being resumed from.

        trainer = Trainer(..., callbacks=[HealingCallback("default")])

    The policy judges the true loss of each optimizer step and the gradient norm before clipping.
    The Trainer's own `max_grad_norm` stays in force: the lower limit holds.

    A callback cannot roll back within `train()`. Where the policy orders a rollback, a line says so
    once, and the checkpoints that were saved after the trouble began are moved away. If a budget of
    the policy is exhausted while the model gets worse, the run stops with a diagnosis
    (`RunStopped`, a SystemExit: the process ends with status 1).

    Args:
        policy: a preset's name, the path of a TOML file, a `Policy`, or a mapping as in a
            checkpoint's trainer_state.json.
        events: the events file, next to which a postmortem is written, or None for neither. "auto"
            is `_healcore/healcore.events.jsonl` in output_dir.
        engine: see `healcore.torch.attach`.
        on_incident: functions that receive an incident and may override what is done; see
            `healcore.Healer`. A checkpoint does not hold these functions.
        console: whether lines are printed to standard error, as for `healcore.Healer`.
        **overrides: values to replace in the policy, `clip={"max_norm": 1.0}`.

    Raises:
        healcore.policy.PolicyError: there is no such policy, or it is not a valid one.
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
        self._last: HealingReport | None = None

    @property
    def healing(self) -> Healing | None:
        """The optimizer's handle during `train()`, else None."""
        return None if self._run is None else self._run.driver.healings["optimizer"]

    def report(self) -> HealingReport | None:
        """The report of the current or last `train()`, or None before the first."""
        return self._last if self._run is None else self._run.report()

    # -- state in checkpoints -------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """The arguments and the state of this object, which the Trainer saves."""
        return {
            "args": {
                "policy": to_dict(self.policy),
                "events": None if self._events is None else os.fspath(self._events),
                "engine": self._engine,
                "console": self._console,
            },
            "attributes": {"saved": None if self._run is None else self._run.exported()},
        }

    # -- events of the Trainer ------------------------------------------------------------------

    def on_init_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Guards the Trainer's `train()`, see `_guard`."""
        trainer = _trainer_of(self)
        if trainer is not None:
            _guard(trainer)

    def on_train_begin(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Attaches the policy; the Trainer has restored its own state by now."""
        if self._run is not None:  # auto_find_batch_size begins again; or it raised, unguarded
            self.close(RuntimeError("train() was begun again"))
        trainer = _trainer_of(self)
        if trainer is None:
            raise AttachError(
                "HealingCallback found no Trainer among its callers: give it to a transformers "
                "Trainer in callbacks=[...], or heal the optimizer with healcore.torch.attach"
            )
        _guard(trainer)
        saved = _saved_in(state, type(self).__name__)
        # transformers 5.23 raises KeyError at the next save if the checkpoint did not have it.
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
        """Reads the decisions, and carries out the orders that a callback can."""
        run = self._run
        if run is None:
            return control
        now = control.should_save or control.should_training_stop or control.should_log
        run.after_step(state.global_step, now=now)
        control.should_save |= run.takes_save()
        return self._checked(control)

    def on_epoch_end(self, args: Args, state: State, control: Control, **kwargs: object) -> Control:
        """Checks the state before it is saved at the end of an epoch."""
        return self._checked(control)

    def on_evaluate(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Reports the evaluation's loss to policies that read it."""
        metrics = kwargs.get("metrics")
        loss = metrics.get("eval_loss") if isinstance(metrics, dict) else None
        if self._run is not None and loss is not None:
            self._run.driver.observe_eval(loss)

    def on_save(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Records the checkpoint that was written."""
        if self._run is not None:
            self._run.saved()

    def on_train_end(self, args: Args, state: State, control: Control, **kwargs: object) -> None:
        """Detaches everything."""
        self.close(None)

    def setup(self, *args: object, **kwargs: object) -> NoReturn:
        """Raises TypeError: this is Lightning's first hook, and the callback is not Lightning's."""
        raise TypeError(
            "HealingCallback is for a transformers or TRL Trainer, and Lightning has called it: "
            "write callbacks=[healcore.torch.LightningHealingCallback(policy)]"
        )

    on_exception = setup  # which Lightning calls next
    state_key = "HealingCallback"  # which Lightning reads before

    def close(self, error: BaseException | None) -> None:
        """Ends the current run, if any. Called at the end of `train()`, also when it raises."""
        run, self._run = self._run, None
        if run is not None:
            run.close(error)
            self._last = run.report()

    # -- within ---------------------------------------------------------------------------------

    def _checked(self, control: Control) -> Control:
        if self._run is not None and control.should_save:
            control.should_save = self._run.may_save()
        return control


def _saved_in(state: State, name: str) -> Any:
    """The callback's state in the checkpoint that the Trainer has resumed from, if any.

    Not the attribute `saved`, which the Trainer sets only if an option says so
    (restore_callback_states_from_checkpoint), on a new object that may serve in a later `train()`.
    """
    exported: Any = state.stateful_callbacks
    found = exported.get(name)
    found = found[0] if isinstance(found, list) else found
    return None if found is None else found.get("attributes", {}).get("saved")


def _trainer_of(callback: HealingCallback) -> Any | None:
    """The Trainer that is calling one of its callbacks; callbacks do not get it as an argument."""
    frame = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        handler = getattr(caller, "callback_handler", None)
        if any(each is callback for each in getattr(handler, "callbacks", ())):
            return caller
        frame = frame.f_back
    return None


def _guard(trainer: Any) -> None:
    """Makes `train()` of one Trainer resume from a good checkpoint, and clean up when it raises.

    A Trainer has no event for either. Raises AttachError for two policies on the same steps;
    nothing has changed then.
    """
    found = _of(trainer)
    if len(found) > 1:
        policies = ", ".join(repr(each.policy.name) for each in found)
        raise AttachError(
            f"a Trainer takes one HealingCallback, and this one has {len(found)} (policies "
            f"{policies}): leave one in callbacks=[...]; trainer.remove_callback(HealingCallback) "
            "takes one out"
        )
    if "train" in vars(trainer):
        return
    original = trainer.train

    @functools.wraps(original)
    def train(*args: Any, **kwargs: Any) -> Any:
        if args:
            args = (_good(trainer, args[0]), *args[1:])
        elif "resume_from_checkpoint" in kwargs:
            given = kwargs["resume_from_checkpoint"]
            kwargs = {**kwargs, "resume_from_checkpoint": _good(trainer, given)}
        try:
            return original(*args, **kwargs)
        except BaseException as error:
            for each in _of(trainer):
                each.close(error)
            raise

    trainer.train = train


def _of(trainer: Any) -> list[HealingCallback]:
    """A Trainer's HealingCallbacks; restoring them from a checkpoint makes new objects."""
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, HealingCallback)
    ]


def _good(trainer: Any, wanted: Any) -> Any:
    """The checkpoint to resume from: `wanted`, or another one if it is bad.

    Renames newer checkpoints that are bad or incomplete (killed during the save): the Trainer would
    use one of them as its latest. Only checkpoints in the folder where the run saves are renamed.
    """
    folder = Path(trainer.args.output_dir)
    if not wanted or all(each.policy.mode == "observe" for each in _of(trainer)):
        return wanted
    if wanted is not True and Path(wanted).absolute().parent != folder.absolute():
        return wanted
    # On every rank: an exchange, if the model of an earlier train() is sharded.
    meant = checkpoints.nonfinite_in(trainer.accelerator.unwrap_model(trainer.model))
    ranks = GlooRanks() if initialized() else Alone()
    target, wrong = on_first(ranks, lambda: checkpoints.resume_target(folder, meant))
    by_name = {path.name: why for path, why in wrong.items()}
    if wanted is not True and Path(wanted).name not in by_name and Path(wanted).is_dir():
        return wanted
    if trainer.args.should_save:
        for path, why in wrong.items():
            new = checkpoints.set_aside(path, why)
            warning(f"{path} is no checkpoint to resume from ({why}): moved to {new}")
    trainer.accelerator.wait_for_everyone()
    if target is None:
        if wrong:
            warning(f"no good checkpoint is left in {folder}: training starts at step 0")
            return None
        return wanted
    return str(target)
