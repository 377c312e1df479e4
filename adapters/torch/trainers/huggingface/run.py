"""Defines `TrainingRun`: one `train()` call of a transformers Trainer with `HealingCallback`."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from healcore.console import Console
from healcore.core.errors import HealcoreError
from healcore.core.verdict import NONFINITE, Cause
from healcore.events import Log
from healcore.events.models import Ending
from healcore.policy import Policy
from healcore.policy.trainer_limit import can_apply_limit
from healcore.runtime.checkpoints.host_state import HostState
from healcore.runtime.data.loader_registry import LoaderRegistry
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.hooks import Hooks
from healcore.runtime.incidents.ledger import Ledger
from healcore.runtime.incidents.rollback import Rollback
from healcore.runtime.incidents.step_lines import cause_text
from healcore.runtime.loop.data import Data
from healcore.runtime.loop.end import described, end_line, ending_of, log_end, write_postmortem
from healcore.runtime.loop.loop import Loop
from healcore.runtime.loop.rank_group import RankGroup
from healcore.runtime.loop.recovery import Recovery
from healcore.runtime.loop.run_settings import batch_text
from healcore.runtime.loop.saver import Saver
from healcore.runtime.loop.start import log_start, start_line
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem import postmortem
from healcore.runtime.recovery.journal import Journal
from healcore.runtime.run_log import RunLog
from healcore.torch.attachment import unwrapped
from healcore.torch.driver import TorchDriver
from healcore.torch.errors import AttachError
from healcore.torch.trainers.huggingface import signals
from healcore.torch.trainers.huggingface.checkpoints import FOLDER, TrainerCheckpoints

_ALTERNATIVES = (
    "a callback cannot roll back within train(): use healcore.torch.heal_trainer(trainer, policy), "
    "which can, or resume from the last known-good checkpoint"
)


class TrainerSaver(Saver):
    """Requests saves from the Trainer, and marks the Trainer's known-good checkpoints.

    `wants_save` is whether the policy has requested a save that the Trainer has not begun.
    """

    def __init__(self, checkpoints: TrainerCheckpoints, ledger: Ledger, log: RunLog) -> None:
        self.checkpoints = checkpoints
        self.wants_save = False
        self._ledger = ledger
        self._log = log

    def save(self, why: str) -> None:
        """Requests a save from the Trainer."""
        self.wants_save = True

    def poll(self) -> None:
        """Marks the checkpoints that have passed probation."""
        ledger = self._ledger
        if not ledger.open:
            for step in self.checkpoints.mark_good(ledger.unhealthy, ledger.next_step):
                self._log.event("good", step=step)


class TrainingRun:
    """One `train()` call, from `on_train_begin` to `close`.

    `events`, `engine` and `console` are arguments of `HealingCallback`. Raises AttachError, before
    any change, for a Trainer that cannot be healed.
    """

    def __init__(
        self,
        trainer: Any,
        policy: Policy,
        *,
        events: Any,
        engine: str,
        hooks: Hooks,
        console: Console,
    ) -> None:
        _check(trainer)
        self._trainer = trainer
        limit = signals.max_grad_norm(trainer)
        adopted = can_apply_limit(policy)
        self.policy = HostPolicy.of(policy, limit=limit if adopted else None)
        self.ending = ""
        self._error: BaseException | None = None
        self.postmortem: Path | None = None
        self.not_carried_out = 0
        self._checked_step = -1
        optimizer = unwrapped(trainer.optimizer)
        with ExitStack() as stack:
            state = {"model": trainer.model, "optimizer": optimizer}
            if trainer.lr_scheduler is not None:
                state["scheduler"] = trainer.lr_scheduler
            attach = {"engine": engine, "scaler": _scaler(trainer)}
            self.driver = TorchDriver(state, self.policy.engine, attach)
            stack.callback(self.driver.close)
            stack.enter_context(signals.unclipped(trainer))
            if limit is not None and not adopted:
                stack.enter_context(signals.clipped_after(trainer, optimizer, limit))
            stack.enter_context(signals.observed_losses(trainer, self.driver.observe))
            stack.enter_context(
                signals.extended_log(trainer, lambda: self._recovery.monitor.metrics.values())
            )
            self.ranks = self.driver.ranks()
            self.log = RunLog(
                Log(None if self.ranks.rank else _events(events, trainer)),
                console=console,
                silent=self.ranks.rank > 0,
            )
            stack.callback(self.log.close)
            self._open = stack.pop_all()
        self._loop = self._new_loop(hooks)
        self._recovery = self._loop.recovery
        self.ledger = self._recovery.ledger
        self.checkpoints = self._loop.saver.checkpoints

    def _new_loop(self, hooks: Hooks) -> Loop[TrainerSaver]:
        trainer, policy, driver = self._trainer, self.policy, self.driver
        step = trainer.state.global_step
        group = RankGroup(self.ranks, driver, votes=False)
        loaders, ledger = LoaderRegistry(), Ledger(next_step=step)
        writes = trainer.args.should_save and not policy.observes
        folder = _folder(trainer)
        checkpoints = TrainerCheckpoints(folder, probation=policy.probation, writes=writes)

        def newest_good() -> tuple[int | None, str | None]:
            newest = checkpoints.last_good
            return newest, None if newest is None else str(checkpoints.path(newest))

        data = Data(
            loaders=loaders,
            host=HostState(loaders.position, None),
            policy=policy,
            ranks=self.ranks,
            termination=group.termination,
            log=self.log,
            journal=Journal(None),
        )
        data.go_to(step)
        recovery = Recovery(
            policy=policy,
            driver=driver,
            data=data,
            ranks=self.ranks,
            log=self.log,
            ledger=ledger,
            hooks=hooks,
            instead=self._cannot_roll_back,
            newest_good=newest_good,
        )
        return Loop(
            policy=policy,
            driver=driver,
            data=data,
            saver=TrainerSaver(checkpoints, ledger, self.log),
            recovery=recovery,
            ranks=group,
            log=self.log,
            has_trainer=True,
        )

    @property
    def step(self) -> int:
        """Number of completed steps."""
        return self._loop.data.step

    def start(self, saved: Any) -> None:
        """Logs the start. `saved` is the `state_dict` in the Trainer's checkpoint, or None."""
        policy, step, args = self.policy, self.step, self._trainer.args
        where = f"checkpoints of the Trainer in {args.output_dir}"
        if self.log.events.path is not None:
            postmortem.of_killed(self.log.events.path)
        fields = {"store": where, "resumes": step > 0}
        log_start(self.log, policy, self.driver, self.ranks, **fields)
        if step:
            self.log.event("resume", step=step, checkpoint=step)
            self._load(saved)
        size, parts = args.per_device_train_batch_size, args.gradient_accumulation_steps
        line = start_line(
            policy,
            step,
            f"{where}; a callback cannot roll back",
            resumed=step > 0,
            learning_rate=self.driver.learning_rate(),
            batch=batch_text(size, parts, self.ranks.world),
        )
        self.log.info(line)

    def state_dict(self) -> dict[str, Any]:
        """The state for the Trainer's checkpoints, which JSON can hold. One sync."""
        return {
            "step": self.step,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }

    def _load(self, saved: Any) -> None:
        """Loads a saved state. Without a usable state, warns and keeps the initial baselines."""
        try:
            if saved is None or saved["step"] != self.step:
                self.log.warning(
                    f"the checkpoint of step {self.step} has no healcore state for that step: "
                    "baselines, budgets and the learning-rate multiplier are reset"
                )
                return
            self.driver.load_healing(saved["engines"])
            ledger = Ledger.from_dict(saved["ledger"])
            self.ledger.continue_from(ledger, self.step, ledger)
        except (HealcoreError, KeyError, TypeError, ValueError) as error:
            self.log.warning(
                f"healcore's state in the checkpoint of step {self.step} was not loaded, and is "
                f"reset: {error}"
            )
            return
        self._recovery.read_engines()

    def read_remaining(self) -> None:
        """Reads the last steps. Raises RunStopped if no step of the run was finite."""
        self._loop.read_remaining()
        self._recovery.stop_if_never_finite(at_end=True)

    def close(self, error: BaseException | None) -> None:
        """Restores the Trainer, and logs how the run ended. A second call does nothing."""
        if self.ending:
            return
        ending = ending_of(error)
        self.ending, self._error = ending.value, error
        raised = trace = None
        if ending is Ending.EXCEPTION and error is not None:
            raised, trace = described(error)
        try:
            if error is None:
                self._loop.saver.poll()
            why = error.why if isinstance(error, RunStopped) else ""
            end = self._recovery.run_end(ending, why, exception=raised)
            if error is not None or self.ledger.incident_count:
                self.postmortem = write_postmortem(self._loop, end, trace)
            log_end(self._loop, end, [])
            self.log.info(end_line(end, not_carried_out=self.not_carried_out))
        finally:
            self._loop.finalizer.detach()
            self._open.close()

    def after_step(self, step: int, *, wait: bool) -> None:
        """Processes an optimizer step; `step` counts from 1. Raises RunStopped if the policy stops.

        With `wait`, waits for the decision of this step.
        """
        loop = self._loop
        loop.data.go_to(step - 1)
        loop.after_step()
        loop.data.go_to(step)  # also after a step that a GradScaler has skipped
        if wait:
            loop.read(all=True)
            loop.saver.poll()

    def take_save_request(self) -> bool:
        """Returns whether the policy has requested a save, and clears the request."""
        saver = self._loop.saver
        requested, saver.wants_save = saver.wants_save, False
        return requested

    def may_save(self) -> bool:
        """Whether the weights are finite and can be saved. One sync.

        Raises RunStopped if the weights hold NaN or Inf, unless the policy only alerts: every
        following step would be skipped.
        """
        if self.policy.observes:
            return True
        self._checked_step = self.step
        if self._finite():
            self.checkpoints.keep_last_good()
            return True
        names = self.driver.nonfinite_weights()
        problem = f"the weights hold NaN or Inf ({', '.join(names[:3])}): not saved"
        if self.policy.nonfinite_state == "alert":
            self.log.problem(self.step, problem)
        else:
            self._recovery.stop(f"{problem}; {_ALTERNATIVES}")
        return False

    def record_save(self) -> None:
        """Records a checkpoint that the Trainer has just written."""
        if self.policy.observes:
            return
        self.checkpoints.add(self.step, in_trouble=self.in_trouble)
        self.log.event("save", step=self.step)
        # save_strategy="best" decides to save after the last event that could prevent the save.
        if self._checked_step != self.step and not self._finite():
            self._quarantine(self.step - 1, "its weights hold NaN or Inf")

    def _finite(self) -> bool:
        """Whether the weights are finite, on all ranks. One sync."""
        return all(self.ranks.gather(self.driver.finite()))

    @property
    def in_trouble(self) -> bool:
        """Whether an incident other than non-finite losses or gradients is open."""
        if not self.ledger.open or not self.ledger.incidents:
            return False
        return bool(Cause(self.ledger.incidents[-1].cause) & ~NONFINITE)

    def _quarantine(self, since: int, why: str) -> None:
        """Moves the candidate checkpoints that were saved after step `since` to `_healcore`."""
        state = self._trainer.state
        for old, new in self.checkpoints.quarantine(since, why):
            self.log.event("quarantine", step=self.step, checkpoint=int(old.name.split("-")[-1]))
            self.log.warning(f"{old.name} must not be resumed from ({why}): moved to {new}")
            best = state.best_model_checkpoint
            if best is not None and Path(best).absolute() == old.absolute():
                state.best_model_checkpoint = str(new)  # its evaluation is still the best

    def _cannot_roll_back(self, order: Rollback) -> None:
        """Reports an ordered rollback, and quarantines the checkpoints since the incident began."""
        cause = cause_text(Cause(order.cause))
        if not self._finite():
            self._recovery.stop(f"{cause}, and the weights hold NaN or Inf; {_ALTERNATIVES}")
        self._quarantine(order.since, f"saved after {cause} began at step {order.since}")
        self.not_carried_out += 1
        line = f"step {order.index}: {cause}: the policy orders a rollback; {_ALTERNATIVES}"
        if self.not_carried_out == 1:
            self.log.problem(order.index, line)
        else:
            self.log.event("problem", step=order.index, problem=line)

    def report(self) -> HealingReport:
        """The report of the run so far."""
        return HealingReport.of(
            self._recovery.run_end(Ending.COMPLETED),
            policy=self.policy.name,
            ending=self.ending,
            attempts=0,
            incidents=self.ledger.incidents,
            driver=self.driver,
            counts={"not_carried_out": self.not_carried_out},
            quarantined=self.checkpoints.quarantined,
            postmortem=self.postmortem,
            error=self._error,
        )


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
    if trainer.optimizer is None:
        raise AttachError("the Trainer has no optimizer yet: call train(), which creates it")


def _scaler(trainer: Any) -> torch.amp.GradScaler | None:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def _folder(trainer: Any) -> Path:
    """Folder in which the Trainer saves: output_dir, or a hyperparameter trial's folder in it."""
    return Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))


def _events(option: Any, trainer: Any) -> Path | None:
    """Path of the events file for the callback's option `events`, or None for no file."""
    if option != "auto":
        return None if option is None else Path(option).absolute()
    return _folder(trainer).absolute() / FOLDER / "healcore.events.jsonl"
