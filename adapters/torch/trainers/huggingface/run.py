"""Defines `TrainingRun`: one `train()` call of a transformers Trainer, healed between its steps."""

from __future__ import annotations

import time
import traceback
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

import torch

from healcore.console import Console
from healcore.core.errors import HealcoreError
from healcore.core.verdict import NONFINITE, Action, Cause
from healcore.events import Log
from healcore.events.models import Ending
from healcore.policy import Policy
from healcore.policy.trainer_limit import keeps_limit
from healcore.runtime.faults.shapes import shape_diagnosis
from healcore.runtime.healing_report import HealingReport
from healcore.runtime.host_policy import HostPolicy
from healcore.runtime.incidents.delayed_reader import DelayedReader, QueuedDispatch
from healcore.runtime.incidents.hooks import Hooks, RunFacts
from healcore.runtime.incidents.step_lines import cause_text
from healcore.runtime.loop.lifecycle import ending_of
from healcore.runtime.loop.run_facts import stop
from healcore.runtime.loop.run_lines import end_line, start_line
from healcore.runtime.loop.run_settings import batch_text, start_rate
from healcore.runtime.loop.termination import RunStopped
from healcore.runtime.postmortem import postmortem
from healcore.runtime.postmortem.diagnosis import RunEnd
from healcore.runtime.recovery.ledger import Ledger
from healcore.runtime.recovery.monitor import IncidentMonitor
from healcore.runtime.recovery.recovery import Recovery
from healcore.runtime.recovery.rollback import Rollback, Status
from healcore.runtime.run_log import RunLog
from healcore.torch.attachment import unwrapped
from healcore.torch.driver import TorchDriver
from healcore.torch.errors import AttachError
from healcore.torch.trainers.huggingface import signals
from healcore.torch.trainers.huggingface.checkpoints import FOLDER, Checkpoints

LAG = 1
"""Steps after which a step's decision is read on the host: by then it has arrived."""

_ELSEWHERE = (
    "a callback cannot go back within train(): healcore.torch.heal(trainer, policy) does, or "
    "resume from the last known-good checkpoint"
)


class TrainingRun:
    """One `train()` call, from `on_train_begin` on; `close` ends it.

    `events`, `engine` and `console` are those of `HealingCallback`. Raises AttachError for a
    Trainer that it cannot heal. Nothing has changed then.
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
        self.policy = HostPolicy.of(policy, limit=limit)
        self.step = trainer.state.global_step
        self.ending = ""
        self._error: BaseException | None = None
        self.postmortem: Path | None = None
        self.not_carried_out = 0
        self.wants_save = False
        self._checked_step = -1
        self._began = time.monotonic()
        optimizer = unwrapped(trainer.optimizer)
        with ExitStack() as stack:
            state = {"model": trainer.model, "optimizer": optimizer}
            if trainer.lr_scheduler is not None:
                state["scheduler"] = trainer.lr_scheduler
            attach = {"engine": engine, "scaler": _scaler(trainer)}
            self.driver = TorchDriver(state, self.policy.engine, attach)
            stack.callback(self.driver.close)
            stack.enter_context(signals.unclipped(trainer))
            if limit is not None and not keeps_limit(policy):
                stack.enter_context(signals.clipped_after(trainer, optimizer, limit))
            stack.enter_context(signals.observed_losses(trainer, self.driver.observe))
            stack.enter_context(
                signals.extended_log(trainer, lambda: self.monitor.metrics.values())
            )
            ranks = self.driver.ranks()
            self.log = RunLog(
                Log(None if ranks.rank else _events(events, trainer)),
                console=console,
                silent=ranks.rank > 0,
            )
            stack.callback(self.log.events.close)
            self._open = stack.pop_all()
        self._healing = self.driver.healings["optimizer"]
        self.ledger = Ledger(next_step=self.step)
        self.checkpoints = Checkpoints(
            _folder(trainer),
            probation=self.policy.probation,
            writes=trainer.args.should_save and not self.policy.observes,
        )
        self.monitor = IncidentMonitor(
            policy=self.policy,
            ledger=self.ledger,
            hooks=hooks,
            ranks=ranks,
            log=self.log,
            facts=self._facts,
            learning_rate=self.driver.learning_rate,
        )
        self._reader = DelayedReader(LAG)
        self._recovery = Recovery(  # without checkpoints to restore: rollbacks stay orders
            policy=self.policy,
            driver=self.driver,
            ranks=ranks,
            ledger=self.ledger,
            log=self.log,
            monitor=self.monitor,
            reader=self._reader,
            stop=self._stop,
        )

    # -- begin and end --------------------------------------------------------------------------

    def start(self, saved: Any) -> None:
        """Logs the start; `saved` is what `exported` gave when the checkpoint was written."""
        policy, ranks = self.policy, self.driver.ranks()
        where = f"checkpoints of the Trainer in {self._trainer.args.output_dir}"
        if self.log.events.path is not None:
            postmortem.of_killed(self.log.events.path)
        self.log.event(
            "start",
            step=None,
            policy=policy.name,
            fingerprint=policy.fingerprint,
            policy_toml=policy.text,
            mode=policy.engine.mode,
            framework=self.driver.framework,
            rank=ranks.rank,
            world=ranks.world,
            lag=LAG,
            store=where,
            resumes=self.step > 0,
        )
        if self.step:
            self.log.event("resume", step=self.step, checkpoint=self.step)
            self._load(saved)
        resumed = self.step > 0
        args = self._trainer.args
        line = start_line(
            policy,
            self.step,
            f"{where}; a callback cannot roll back",
            resumed=resumed,
            learning_rate=start_rate(self.driver.hyperparameters()),
            batch=batch_text(
                args.per_device_train_batch_size, args.gradient_accumulation_steps, ranks.world
            ),
        )
        self.log.info(line)

    def exported(self) -> dict[str, Any]:
        """What travels in the Trainer's checkpoints, JSON-safe. A sync on an accelerator."""
        return {
            "step": self.step,
            "engines": self.driver.healing(),
            "ledger": self.ledger.to_dict(),
        }

    def _load(self, saved: Any) -> None:
        """Goes on from a saved state; a checkpoint without one begins with fresh baselines."""
        try:
            if saved is None or saved["step"] != self.step:
                self.log.warning(
                    f"the checkpoint of step {self.step} holds no state of healcore for that step: "
                    "baselines, budgets and the learning-rate multiplier start again"
                )
                return
            self.driver.load_healing(saved["engines"])
            ledger = Ledger.from_dict(saved["ledger"])
            self.ledger.take_over(ledger, self.step, ledger)
        except (HealcoreError, KeyError, TypeError, ValueError) as error:
            self.log.warning(
                f"healcore's state in the checkpoint of step {self.step} was not loaded, and "
                f"starts again: {error}"
            )
            return
        self.monitor.set_engines(self.driver.healing())

    def close(self, error: BaseException | None) -> None:
        """Detaches everything, and writes how the run has ended. A second call does nothing."""
        if self.ending:
            return
        ending = ending_of(error)
        self.ending, self._error = ending.value, error
        raised = trace = None
        if ending is Ending.EXCEPTION and error is not None:
            raised = "".join(traceback.format_exception_only(error)).strip()
            trace = "".join(traceback.format_exception(error))
        try:
            if error is None:
                self._read(all=True, carry_out=False)
            why = error.why if isinstance(error, RunStopped) else ""
            end = self.run_end(ending, why, raised, shape_diagnosis(error))
            events = self.log.events
            if events.path is not None and (error is not None or self.ledger.incident_count):
                path = postmortem.path_for(events.path, events.run)
                found = postmortem.of(
                    end, events, seconds=time.monotonic() - self._began, trace=trace
                )
                problem = postmortem.write(path, found)
                self.postmortem = None if problem else path
                if problem:
                    self.log.warning(problem)
            self.log.event(
                "end",
                step=self.step,
                ending=ending,
                incidents=end.incidents,
                rollbacks=0,
                last_good=end.last_good,
                unreported_alarms=self.monitor.unreported_alarms or None,
            )
            self.log.info(end_line(end, not_carried_out=self.not_carried_out))
        finally:
            self._open.close()

    # -- between steps --------------------------------------------------------------------------

    def after_step(self, step: int, *, now: bool) -> None:
        """Takes an optimizer step; `step` counts from 1. `now`: its decision is waited for.

        Raises RunStopped if the policy ends the run.
        """
        self.step = step
        pending = self.driver.poll_step()
        if pending is not None:
            self._reader.push(QueuedDispatch(step - 1, pending, ()))
        while self.driver.warnings:
            self.log.problem(step, self.driver.warnings.pop(0))
        self._read(all=now)

    def may_save(self) -> bool:
        """Whether the state is fit to be saved. One sync.

        Raises RunStopped if the weights hold NaN or Inf and the policy does not let that pass: the
        steps that follow would all be skipped.
        """
        if self.policy.observes:
            return True
        self._checked_step = self.step
        if self._finite():
            self.checkpoints.keep_last_good()
            return True
        names = [
            name
            for name, p in self._trainer.model.named_parameters()
            if not bool(p.isfinite().all())
        ]
        problem = f"the weights hold NaN or Inf ({', '.join(names[:3])}): not saved"
        if self.policy.nonfinite_state == "alert":
            self.log.problem(self.step, problem)
        else:
            self._stop(f"{problem}; {_ELSEWHERE}")
        return False

    def saved(self) -> None:
        """Takes a checkpoint that the Trainer has just written."""
        if self.policy.observes:
            return
        self.checkpoints.add(self.step, in_trouble=self.in_trouble)
        self.log.event("save", step=self.step)
        # save_strategy="best" decides on a save after the last event in which it can be prevented.
        if self._checked_step != self.step and not self._finite():
            self.quarantine(self.step - 1, "its weights hold NaN or Inf")

    def _finite(self) -> bool:
        """Whether the weights are finite, on all ranks. One sync."""
        return all(self.driver.ranks().gather(self.driver.finite()))

    @property
    def in_trouble(self) -> bool:
        """Whether an incident is open that skipping its steps does not explain."""
        if not self.ledger.open or not self.ledger.incidents:
            return False
        return bool(Cause(self.ledger.incidents[-1].cause) & ~NONFINITE)

    def quarantine(self, since: int, why: str) -> None:
        """Moves checkpoints saved after step `since` away that are not known-good."""
        state = self._trainer.state
        for old, new in self.checkpoints.quarantine(since, why):
            self.log.event("quarantine", step=self.step, checkpoint=int(old.name.split("-")[-1]))
            self.log.warning(f"{old.name} is no place to resume from ({why}): moved to {new}")
            best = state.best_model_checkpoint
            if best is not None and Path(best).absolute() == old.absolute():
                state.best_model_checkpoint = str(new)  # the best by its evaluation all the same

    def _read(self, *, all: bool, carry_out: bool = True) -> None:
        for result in self._reader.due(all=all):
            self._reader.count_correction()
            order = self.monitor.process(result)
            if order is not None and carry_out:
                self._carry_out(order)
            elif order is not None:
                self.log.problem(
                    result.index,
                    f"{cause_text(Cause(order.cause))} in the last step: the order was not carried "
                    "out",
                )
        if not self.ledger.open:
            for step in self.checkpoints.mark_good(self.ledger.unhealthy, self.ledger.next_step):
                self.log.event("good", step=step)

    def _carry_out(self, order: Rollback) -> None:
        """Carries out what a callback can: it saves, stops, and says what it cannot do."""
        self._recovery.carry_out(order, self.step)
        self.wants_save |= bool(order.action & Action.SAVE)
        if order.status is not Status.ORDERED or not order.action & Action.ROLLBACK:
            return
        cause = cause_text(Cause(order.cause))
        if not self._finite():
            self._stop(f"{cause}, and the weights hold NaN or Inf; {_ELSEWHERE}")
        self.quarantine(order.since, f"saved after {cause} had begun at step {order.since}")
        self.not_carried_out += 1
        line = f"step {order.index}: {cause}: the policy orders a rollback; {_ELSEWHERE}"
        if self.not_carried_out == 1:
            self.log.problem(order.index, line)
        else:
            self.log.event("problem", step=order.index, problem=line)

    def _stop(self, why: str) -> NoReturn:
        """Ends the run with a diagnosis."""
        stop(self.log, self.run_end(Ending.STOPPED, why))

    # -- reports --------------------------------------------------------------------------------

    def report(self) -> HealingReport:
        """What was seen and done so far."""
        return HealingReport.of(
            self.run_end(Ending.COMPLETED),
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

    def _facts(self) -> RunFacts:
        """The facts for a hook."""
        return RunFacts(
            run=self.log.events.run,
            policy=self.policy.name,
            observes=self.policy.observes,
            framework=self.driver.framework,
            rank=self.driver.ranks().rank,
            learning_rate=self.driver.learning_rate(),
            last_good=self.checkpoints.last_good,
        )

    def run_end(
        self, ending: Ending, why: str = "", exception: str | None = None, hint: str = ""
    ) -> RunEnd:
        """The facts for a diagnosis."""
        good = self.checkpoints.last_good
        return RunEnd(
            ending=ending,
            step=self.step,
            why=why,
            last_good=good,
            last_good_path=None if good is None else str(self.checkpoints.path(good)),
            exception=exception,
            hint=hint,
            declined=self._recovery.declined,
            **self.monitor.end_facts(),
        )


def _check(trainer: Any) -> None:
    """AttachError for a Trainer whose optimizer steps healcore does not see as they are."""
    kind = str(getattr(trainer.accelerator.distributed_type, "value", ""))
    if kind == "DEEPSPEED":
        raise AttachError(
            "HealingCallback does not heal a Trainer with DeepSpeed, whose engine clips, skips and "
            "steps by itself: use healcore.torch.heal_engine in a loop of your own, or train "
            "without DeepSpeed"
        )
    if kind == "FSDP" and not trainer.accelerator.is_fsdp2:
        raise AttachError(
            "HealingCallback does not heal FSDP 1, where a rank sees the norm of its shard only: "
            'use FSDP 2, TrainingArguments(fsdp_config={"fsdp_version": 2})'
        )
    if trainer.optimizer is None:
        raise AttachError("the Trainer has no optimizer yet: call train(), which makes it")


def _scaler(trainer: Any) -> torch.amp.GradScaler | None:
    scaler = getattr(trainer.accelerator, "scaler", None)
    return scaler if isinstance(scaler, torch.amp.GradScaler) else None


def _folder(trainer: Any) -> Path:
    """Where the Trainer saves: output_dir, or a folder in it of a hyperparameter search's trial."""
    return Path(trainer._get_output_dir(getattr(trainer, "_trial", None)))


def _events(given: Any, trainer: Any) -> Path | None:
    if given != "auto":
        return None if given is None else Path(given).absolute()
    return _folder(trainer).absolute() / FOLDER / "healcore.events.jsonl"
